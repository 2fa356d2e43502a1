"""Conversations that are answered again, turn by turn, by any backend, and their prompts.

Each prompt contains the target's own earlier answers, token by token as tokenize_chat renders it with the target's
processor. A conversation that ends with the user's turn gets an answer. Nothing here depends on the filters, which
run.py applies to what was answered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, count
from pathlib import Path
from typing import Any

from attrs import Factory, asdict, define, evolve, field, frozen

from dsl.errors import DataError
from dsl.files import parsed_object
from ops.artifacts import TargetModel
from ops.ingest.sample import LAST, THINK
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
from ops.regenerate_answers.op import RegenerateAnswers, ToolResults
from ops.regenerate_answers.shards import Answer, Key, turns_of
from ops.tokenize_chat.channels import split_call, without_channels
from ops.tokenize_chat.contexts import SHORT_IDS, as_shown, calls_text
from ops.tokenize_chat.encode import ChatEncoder, load_images, num_images, prompt_ids, prompt_sample
from ops.tokenize_chat.template import SPECIAL_IN_TEXT, Documents, Messages, Tools, value_or_unusable


@frozen
class Prompts:
    """The target's chat encoder for prompts of samples.

    folder: that of their image packs. keeps_reasoning: whether prompts have the reasoning of earlier answers.
    """

    encoder: ChatEncoder
    folder: Path
    keeps_reasoning: bool = True

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
        encoder = ChatEncoder(processor, config.enable_thinking, tools_as=config.tools_as)
        encoder.last_only = encoder.template.has_channels  # such a template closes no earlier answer
        return cls(encoder, folder, config.history_reasoning == "kept")

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

    def shown(self, messages: Messages) -> Messages:
        """The messages as a server gives them to the chat template: reasoning is under the key that it shows."""
        return as_shown(self.encoder.habits, messages, self.keeps_reasoning)[1]

    def opens_thought(self, row: dict[str, Any]) -> bool:
        """Whether the generation prompt after a row's messages opens a thought, so that answers lack the tag."""
        return self._prompt(row).rstrip().endswith(THINK)

    def _prompt(self, row: dict[str, Any]) -> str:
        messages, tools, documents = self.shown(row["messages"]), row.get("tools", ()), row.get("documents", ())
        return self.encoder.template.render(messages, prompt=True, tools=tools, documents=documents)

    def ids(self, row: dict[str, Any]) -> tuple[list[int], int]:
        """The ids of the prompt after a row's messages, with one placeholder for each image, and their number with
        images expanded.

        No image is decoded. Raises Unusable.
        """
        messages, tools, documents = row["messages"], row.get("tools", ()), row.get("documents", ())
        self.encoder.template.check(messages, tools, documents)
        return prompt_ids(row["id"], self.shown(messages), self.encoded_images(row), self.encoder, tools, documents)

    def sample(self, row: dict[str, Any]) -> TokenSample:
        """The target's input for a row's messages and the generation prompt, with images. Raises Unusable."""
        images = load_images(row["images"], self.folder, self.encoder.processor)
        messages, tools, documents = self.shown(row["messages"]), row.get("tools", ()), row.get("documents", ())
        return prompt_sample(row["id"], row["category"], messages, images, self.encoder, tools, documents)

    def encoded_images(self, row: dict[str, Any]) -> list[bytes]:
        """The encoded images of a row, as they were ingested."""
        return [read_packed(self.folder, reference) for reference in row["images"]]

    def text(self, tokens: list[int]) -> str:
        """The text of generated tokens without their EOS, including thinking tags; of channels see channels.py."""
        text = self.encoder.text_of(tokens)
        return without_channels(text) if self.encoder.template.has_channels else text

    def with_calls(self, conversation: Conversation, answer: Answer) -> Answer:
        """The next answer of a conversation, with the calls that its text has.

        Calls are read only if they are what the template writes for those of the data, blanks aside; of gpt-oss, whose
        channels say what is a call, all are.
        """
        tools, wanted = conversation.row.get("tools", ()), conversation.turns[conversation.place]
        if not tools:
            return answer
        if self.encoder.template.has_channels:
            return _with_call_of_channels(conversation, answer)
        if "tool_calls" in wanted:
            encoder = self.encoder
            asked = conversation.messages, wanted["tool_calls"], tools
            wanted_text = calls_text(encoder.habits, encoder.eos_texts, *asked)
            written = encoder.template.finish(wanted_text, documents=conversation.row.get("documents", ()))
            before = before_same_end(answer.text, written)
            if before is not None:
                calls = conversation.with_ids(wanted["tool_calls"])
                return evolve(answer, text=before.rstrip(), called=True, calls=calls)
        markup = self.encoder.habits.markup
        _, call = markup.parts(answer.text, markup.is_opened_by(self._prompt(conversation.asked)))
        return evolve(answer, called=call < len(answer.text))

    def as_written(self, conversation: Conversation, answer: Answer, written: str) -> Answer:
        """The next answer of a conversation with its thought as reasoning, where the target thinks in special tokens,
        which no text may hold.

        written: all of it, as `text` gives it, of which a server's parsers may have left less in the answer.
        """
        if self.encoder.template.has_channels:
            return evolve(answer, text=split_call(written)[0].rstrip()) if answer.calls else answer
        special, markup = self.encoder.template.special_tokens, self.encoder.habits.markup
        if not any(tag in special for pair in self.encoder.habits.thoughts for tag in pair):
            return answer
        is_open = markup.is_opened_by(self._prompt(conversation.asked))
        return evolve(answer, text=markup.apart(answer.text, is_open)[1], reasoning=markup.apart(written, is_open)[0])

    def takes(self, text: str, tokens: list[int]) -> bool:
        """True, if an answer's tokens can be learnt as they are. text: as `text` gives it.

        Raises Unusable for tokens with which other turns begin or end, those of images, and others than the model's.
        With channels, which begin like turns, no special token may be left in the text but those around a call.
        """
        self.encoder.check_ids(tokens)
        if self.encoder.template.has_channels:
            text = "\0".join(split_call(text))
        names = self.encoder.processor.tokenizer.convert_ids_to_tokens(tokens)
        inside = names[:-1] if tokens[-1] in self.encoder.processor.eos_token_ids else names
        for token in self.encoder.template.special_tokens:
            if token in text if self.encoder.template.has_channels else token in inside and self._is_of_turns(token):
                raise Unusable(SPECIAL_IN_TEXT, token)
        return True

    def _is_of_turns(self, token: str) -> bool:
        if MEDIA.search(token) is not None:
            return True
        tags = (tag for pair in self.encoder.habits.thoughts for tag in pair)
        return token in self.encoder.headers and token not in tags

    def count(
        self, sample_id: str, messages: Messages, tools: Tools, is_cut: bool, documents: Documents = ()
    ) -> int | None:
        """Tokens of the last answer in served contexts, without EOS; None where the template does not show it whole.

        is_cut: whether it was cut off, so that it may end inside a thought. Raises Unusable for special tokens.
        """
        cut = [False] * (sum(message["role"] == "assistant" for message in messages) - 1) + [is_cut]
        [served] = self.encoder.of_last.serve_batch(
            [messages], [cut], [sample_id], [tools], self.keeps_reasoning, [documents]
        )
        if isinstance(served, Unusable):
            if served.reason == SPECIAL_IN_TEXT:
                raise served
            return None
        encoded = value_or_unusable(self.encoder.encode_context, messages, served.contexts[-1])
        if isinstance(encoded, Unusable):
            return None
        last = encoded.input_ids[encoded.loss_mask][-1:].tolist()
        return encoded.loss_tokens - any(token in self.encoder.processor.eos_token_ids for token in last)

    def length(self, text: str) -> int:
        """The number of tokens of a text."""
        return len(self.encoder.processor.tokenizer.encode(text, add_special_tokens=False))


def _with_call_of_channels(conversation: Conversation, answer: Answer) -> Answer:
    """The next answer of a conversation, with the call that its text ends with, in the channel of gpt-oss."""
    before, name, written = split_call(answer.text)
    if not name:
        return answer
    arguments = parsed_object(written)
    if arguments is None:
        return evolve(answer, called=True)
    call = {"id": "", "type": "function", "function": {"name": name, "arguments": arguments}}
    return evolve(answer, text=before.rstrip(), called=True, calls=conversation.with_ids([call]))


def before_same_end(text: str, end: str) -> str | None:
    """The text before its end, which is the given one with other blanks; None if it is not."""
    bare, wanted = "".join(text.split()), "".join(end.split())
    if not wanted or not bare.endswith(wanted):
        return None
    places = [place for place, character in enumerate(text) if not character.isspace()]
    return text[: places[len(bare) - len(wanted)]]


MEDIA = re.compile("image|img|vision|video|audio", re.IGNORECASE)  # tokens that stand for no text
LONG_PROMPT = "prompt longer than max_prompt_tokens"
IMAGE_IN_ANSWER = "image in an answer"
NOTHING_ASKED = "no turn to answer"
EMPTY_ANSWER = "empty answer"
UNREADABLE_CALLS = "calls that cannot be read"  # and whose tokens a server does not report
SPECIAL_IN_ANSWER = "special token in the target's answer"  # those in a prompt are found before the request


@define
class Conversation:
    """A sample being answered.

    messages: the turns before the next answer, with the target's own answers, and images: the references of their
    images. place: of the next answer in the turns of the data. reason: why the sample is dropped, "" if it is not.
    is_cut: whether it ended behind calls that are not the data's. skipped: answers without calls where the data calls.
    """

    row: dict[str, Any]
    tool_results: ToolResults = "same_name"
    answers: list[Answer] = field(factory=list)
    reason: str = ""
    detail: str = ""
    turns: list[dict[str, Any]] = field(default=Factory(lambda self: turns_of(self.row), takes_self=True))
    messages: list[dict[str, Any]] = field(init=False, factory=list)
    images: list[dict[str, Any]] = field(init=False, factory=list)
    place: int = field(init=False, default=0)
    is_cut: bool = field(init=False, default=False)
    skipped: int = field(init=False, default=0)
    _images_before: list[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._images_before = [0, *accumulate(map(num_images, self.turns))]
        answers = [turn for turn in self.turns if turn["role"] == "assistant"]
        if any(part["type"] == "image" for turn in answers for part in turn["content"]):
            self.reason = IMAGE_IN_ANSWER
        elif not answers:
            self.reason = NOTHING_ASKED
        self._go_on(0)

    @classmethod
    def told(cls, row: dict[str, Any], tool_results: ToolResults, answers: Iterable[Answer]) -> Conversation:
        """A sample with its answers."""
        conversation = cls(row, tool_results)
        for answer in answers:
            conversation.take(answer)
        return conversation

    @property
    def finished(self) -> bool:
        return bool(self.reason) or self.place == len(self.turns)

    @property
    def key(self) -> Key:
        """The key of the next answer: the sample's id, and the number of answers so far."""
        return self.row["id"], len(self.answers)

    @property
    def asked(self) -> dict[str, Any]:
        """The row with the messages and images before the next answer, or of the finished conversation."""
        return {**self.row, "messages": self.messages, "images": self.images}

    def _go_on(self, place: int) -> None:
        """Keep the turns of the data from a place on, up to the next answer.

        Of a row of which only the last answer is learnt, the others are the data's.
        """
        last = len(self.turns) - 1
        while place <= last and (not self._is("assistant", place) or (self.row.get("learnt") == LAST and place < last)):
            self._keep(place)
            place += 1
        self.place = place

    def _keep(self, place: int, **changes: Any) -> None:
        self.messages.append({**self.turns[place], **changes})
        self.images += self.row["images"][self._images_before[place] : self._images_before[place + 1]]

    def take(self, answer: Answer) -> None:
        """Add the next answer, and what the data has behind it.

        Behind the data's own calls these are its results, by the ids of the target's calls; behind others nothing.
        Without a call where the data has one, they are the turns from the user's next one on.
        """
        self.answers.append(answer)
        self.reason, self.detail = answer.reason, answer.detail
        self.messages.append(answer.turn())
        asked, behind = self.turns[self.place].get("tool_calls", ()), self.place + 1
        results = range(
            behind, next((n for n in range(behind, len(self.turns)) if not self._is("tool", n)), len(self.turns))
        )
        if not (answer.called or asked):
            self._go_on(behind)
        elif not answer.called:
            self.skipped += behind < len(self.turns)
            self._go_on(next((n for n in range(behind, len(self.turns)) if self._is("user", n)), len(self.turns)))
        elif (own := matched_calls(asked, answer.calls or (), self.tool_results)) is None:
            self.is_cut = behind < len(self.turns)
            self.place = len(self.turns)
        else:
            order = [each["id"] for each in answer.calls or ()]
            ids = {n: own.get(self.turns[n]["tool_call_id"], "") for n in results}
            for place in sorted((n for n in results if ids[n]), key=lambda n: order.index(ids[n])):
                self._keep(place, tool_call_id=ids[place])
            self._go_on(results.stop)

    def with_ids(self, calls: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """The calls of the next answer, with ids of their own if some have none, or those of other calls."""
        used = [call["id"] for turn in self.messages for call in turn.get("tool_calls", ())]
        ids = [call["id"] for call in calls or ()]
        if not calls or ("" not in ids and len({*used, *ids}) == len(used) + len(ids)):
            return calls
        fresh = (each for each in map(SHORT_IDS.format, count(1)) if each not in used)
        return [{**call, "id": own} for call, own in zip(calls, fresh, strict=False)]

    def _is(self, role: str, place: int) -> bool:
        return bool(self.turns[place]["role"] == role)

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
        if not (answer.text.strip() or answer.reasoning or answer.calls):
            return evolve(answer, reason=EMPTY_ANSWER)
        try:
            return evolve(answer, retokenised_differently=not same([*self.messages, answer.turn()]))
        except Unusable as fault:
            reason = SPECIAL_IN_ANSWER if fault.reason == SPECIAL_IN_TEXT else fault.reason
            return evolve(answer, reason=reason, detail=fault.detail)


def matched_calls(
    of_data: Sequence[dict[str, Any]], own: Sequence[dict[str, Any]], tool_results: ToolResults
) -> dict[str, str] | None:
    """The ids of the target's calls by those of the data's, which call the same; None if others are called.

    The same are the same functions, in any order, and with "same_call" the same arguments too.
    """
    if tool_results == "none" or len(of_data) != len(own):
        return None
    left, found = [(each["id"], each["function"]) for each in own], {}
    for exactly in (True,) if tool_results == "same_call" else (True, False):
        for call in of_data:
            wanted = call["function"]
            same = (each for each in left if each[1] == wanted or (not exactly and each[1]["name"] == wanted["name"]))
            if call["id"] not in found and (match := next(same, None)) is not None:
                found[call["id"]] = match[0]
                left.remove(match)
    return None if left else found
