"""Conversations that are answered again, turn by turn, by any backend, and their prompts.

Each prompt contains the target's own earlier answers, token by token as tokenize_chat renders it with the target's
processor. A conversation that ends with the user's turn gets an answer. Nothing here depends on the filters, which
run.py applies to what was answered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import Factory, asdict, define, evolve, field, frozen

from dsl.errors import DataError
from ops.artifacts import TargetModel
from ops.ingest.sample import THINK
from ops.lib.data.image_packs import read_packed
from ops.lib.data.sample_account import Unusable
from ops.lib.data.token_shards import TokenSample
from ops.lib.target.checkpoint_files import trusts_own_code
from ops.lib.target.fetch import find_processor
from ops.lib.target.model import target_info
from ops.lib.vision.chat_template import read_chat_template
from ops.lib.vision.processor import load_processor
from ops.lib.vision.template_kinds import template_warnings
from ops.regenerate_answers.conflicts import check_context
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.shards import Answer, Key
from ops.tokenize_chat.channels import for_channels, without_channels
from ops.tokenize_chat.encode import ChatEncoder, load_images, num_images, prompt_ids, prompt_sample
from ops.tokenize_chat.template import SPECIAL_IN_TEXT, Messages


@frozen
class Prompts:
    """The target's chat encoder for prompts of samples. folder: that of their image packs."""

    encoder: ChatEncoder
    folder: Path

    @classmethod
    def load(cls, config: RegenerateAnswers, target: TargetModel | None, folder: Path) -> Prompts:
        """Load the target's processor or, without a target, the config's.

        Raises ConfigError for an enable_thinking that the target's template does not read, and DataError for limits
        beyond its context.
        """
        trusted = config.trust_remote_code
        source = (
            str(target.path / "model") if target else find_processor(str(config.processor), config.revision, trusted)
        )
        processor = load_processor(
            source,
            config.min_pixels,
            config.max_pixels,
            trust_remote_code=trusts_own_code(Path(source), target_info(target)) if target else trusted,
            image_backend=config.image_backend,
            chat_template=read_chat_template(config.chat_template),
        )
        check_context(config, Path(source))  # after the checks of what the directory links to
        encoder = ChatEncoder(processor, config.enable_thinking)
        encoder.last_only = encoder.template.has_channels  # such a template closes no earlier answer
        return cls(encoder, folder)

    @property
    def warnings(self) -> list[str]:
        """What the target's chat template does that its answers depend on, with advice."""
        processor = self.encoder.processor
        return list(template_warnings([processor.tokenizer.get_chat_template()], processor.special_tokens))

    def check_sees_images(self, sample_id: str) -> None:
        """Check that the target can see images. Raises DataError."""
        processor = self.encoder.processor
        if not processor.sees:
            raise DataError(
                f'sample "{sample_id}" has an image, but the target has no image processor '
                "(preprocessor_config.json): remove the image samples, or use a vision-language target"
            )

    def opens_thought(self, messages: Messages) -> bool:
        """Whether the generation prompt after `messages` opens a thought, so that answers lack the tag."""
        return self.encoder.template.render(messages, prompt=True).rstrip().endswith(THINK)

    def ids(self, row: dict[str, Any], messages: Messages) -> tuple[list[int], int]:
        """The prompt's token ids with one placeholder for each image, and their number with images expanded.

        No image is decoded. Raises Unusable.
        """
        return prompt_ids(row["id"], messages, self.encoded_images(row, messages), self.encoder)

    def sample(self, row: dict[str, Any], messages: Messages) -> TokenSample:
        """The target's input for the turns so far and the generation prompt, with images. Raises Unusable."""
        references = row["images"][: sum(map(num_images, messages))]
        images = load_images(references, self.folder, self.encoder.processor)
        return prompt_sample(row["id"], row["category"], messages, images, self.encoder)

    def encoded_images(self, row: dict[str, Any], messages: Messages) -> list[bytes]:
        """The encoded images of the turns, as they were ingested."""
        return [read_packed(self.folder, reference) for reference in row["images"][: sum(map(num_images, messages))]]

    def text(self, tokens: list[int]) -> str:
        """The text of generated tokens without their EOS, including thinking tags; of channels see channels.py."""
        text = self.encoder.text_of(tokens)
        return without_channels(text) if self.encoder.template.has_channels else text

    def sent(self, messages: Messages) -> Messages:
        """The messages as a server's chat template takes them."""
        return for_channels(messages) if self.encoder.template.has_channels else messages

    def takes(self, text: str, tokens: list[int]) -> bool:
        """True, if an answer's tokens can be learnt as they are. text: as `text` gives it.

        Raises Unusable for tokens with which other turns begin or end, those of images, and others than the model's.
        With channels, which begin like turns, no special token may be left in the text.
        """
        self.encoder.check_ids(tokens)
        names = self.encoder.processor.tokenizer.convert_ids_to_tokens(tokens)
        inside = names[:-1] if tokens[-1] in self.encoder.processor.eos_token_ids else names
        for token in self.encoder.template.special_tokens:
            if token in text if self.encoder.template.has_channels else token in inside and self._is_of_turns(token):
                raise Unusable(SPECIAL_IN_TEXT, token)
        return True

    def _is_of_turns(self, token: str) -> bool:
        return MEDIA.search(token) is not None or token in self.encoder.headers

    def count(self, messages: Messages) -> int:
        """Tokens of the last answer in tokenize_chat, EOS included. Raises Unusable."""
        encoded = self.encoder.encode(messages)
        return int(encoded.loss_mask[encoded.prompt_tokens :].sum())

    def length(self, text: str) -> int:
        """The number of tokens of a text."""
        return len(self.encoder.processor.tokenizer.encode(text, add_special_tokens=False))


MEDIA = re.compile("image|img|vision|video|audio", re.IGNORECASE)  # tokens that stand for no text
LONG_PROMPT = "prompt longer than max_prompt_tokens"
IMAGE_IN_ANSWER = "image in an answer"
NOTHING_ASKED = "no turn to answer"
HAS_TOOLS = "the sample has tools, which regenerate_answers does not send"
EMPTY_ANSWER = "empty answer"
SPECIAL_IN_ANSWER = "special token in the target's answer"  # those in a prompt are found before the request


def turns_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The turns of a sample, with an empty answer at the end if the last turn is the user's."""
    turns = list(row["messages"])
    spoken = [turn["role"] for turn in turns if turn["role"] != "system"]
    return [*turns, {"role": "assistant", "content": []}] if spoken[-1:] == ["user"] else turns


def with_answers(turns: Messages, answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns with the given answers in place of their own, ending before the next answer, or at the end."""
    remaining, messages = iter(answers), []
    for turn in turns:
        if turn["role"] != "assistant":
            messages.append(turn)
        elif (answer := next(remaining, None)) is not None:
            messages.append(answer)
        else:
            break
    return messages


def answer_turn(text: str) -> dict[str, Any]:
    """An answer as a message."""
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


@define
class Conversation:
    """A sample being answered. reason: why it is dropped, "" if it is not."""

    row: dict[str, Any]
    answers: list[Answer] = field(factory=list)
    reason: str = ""
    detail: str = ""
    turns: list[dict[str, Any]] = field(default=Factory(lambda self: turns_of(self.row), takes_self=True))
    wanted: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        answers = [turn for turn in self.turns if turn["role"] == "assistant"]
        self.wanted = len(answers)
        if "tools" in self.row:
            self.reason = HAS_TOOLS
        elif any(part["type"] == "image" for turn in answers for part in turn["content"]):
            self.reason = IMAGE_IN_ANSWER
        elif not answers:
            self.reason = NOTHING_ASKED

    @property
    def finished(self) -> bool:
        return bool(self.reason) or len(self.answers) == self.wanted

    @property
    def key(self) -> Key:
        """The key of the next answer: the sample's id, and the number of answers so far."""
        return self.row["id"], len(self.answers)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The turns before the next answer."""
        return with_answers(self.turns, [answer_turn(answer.text) for answer in self.answers])

    def take(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.reason, self.detail = answer.reason, answer.detail

    def outcome(self) -> dict[str, Any]:
        """The conversation's line in a shard of the work folder: the answers, and the reason why it is dropped."""
        return {
            "id": self.row["id"],
            "answers": [asdict(answer) for answer in self.answers],
            "reason": self.reason,
            "detail": self.detail,
        }

    def drop(self, reason: str, detail: str) -> None:
        """Drop the sample: no further answers are requested."""
        self.reason, self.detail = reason, detail

    def judged(self, answer: Answer, same: Callable[[Messages], bool]) -> Answer:
        """The next answer, with a flag whether other tokens are learnt than were generated.

        same: whether the same tokens are learnt of messages that end with the answer, such as `Prompts.takes`.
        """
        if not answer.text.strip():
            return evolve(answer, reason=EMPTY_ANSWER)
        messages = with_answers(self.turns, [answer_turn(each.text) for each in (*self.answers, answer)])
        last = max(place for place, turn in enumerate(messages) if turn["role"] == "assistant")
        try:
            return evolve(answer, retokenised_differently=not same(messages[: last + 1]))
        except Unusable as fault:
            reason = SPECIAL_IN_ANSWER if fault.reason == SPECIAL_IN_TEXT else fault.reason
            return evolve(answer, reason=reason, detail=fault.detail)
