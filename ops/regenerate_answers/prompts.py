"""Prompts for the target, token by token as tokenize_chat renders them with the target's processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.errors import DataError
from ops.artifacts import TargetModel
from ops.ingest.sample import THINK
from ops.lib.data.image_packs import read_packed
from ops.lib.data.token_shards import TokenSample
from ops.lib.target.checkpoint_files import trusts_own_code
from ops.lib.target.fetch import find_processor
from ops.lib.target.model import target_info
from ops.lib.vision.chat_template import read_chat_template
from ops.lib.vision.processor import load_processor
from ops.regenerate_answers.context import check_context
from ops.regenerate_answers.op import RegenerateAnswers
from ops.tokenize_chat.encode import ChatEncoder, num_images
from ops.tokenize_chat.samples import load_images, prompt_sample
from ops.tokenize_chat.template import Messages


@frozen
class Prompts:
    """The target's chat encoder for samples whose image packs are in `folder`."""

    encoder: ChatEncoder
    folder: Path

    @classmethod
    def load(cls, config: RegenerateAnswers, target: TargetModel | None, folder: Path) -> Prompts:
        """With the target's processor, or that of the config without a target.

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
        return cls(ChatEncoder(processor, config.enable_thinking), folder)

    def check_sees_images(self, sample_id: str) -> None:
        """Raises DataError if the target is a text model."""
        processor = self.encoder.processor
        if processor.image_processor is None or processor.image_token_id is None:
            raise DataError(
                f'sample "{sample_id}" has an image, but the target has no image processor '
                "(preprocessor_config.json): remove the image samples, or use a vision-language target"
            )

    def opens_thought(self, messages: Messages) -> bool:
        """Whether the generation prompt after `messages` opens a thought, so that answers lack the tag."""
        return self.encoder.template.render(messages, prompt=True).rstrip().endswith(THINK)

    def sample(self, row: dict[str, Any], messages: Messages) -> TokenSample:
        """The turns so far of a sample and the generation prompt, with their images. Raises Unusable."""
        references = row["images"][: sum(map(num_images, messages))]
        images = load_images(references, self.folder, self.encoder.processor)
        return prompt_sample(row["id"], row["category"], messages, images, self.encoder)

    def encoded_images(self, row: dict[str, Any], messages: Messages) -> list[bytes]:
        """The images of the turns, as they were ingested."""
        return [read_packed(self.folder, reference) for reference in row["images"][: sum(map(num_images, messages))]]

    def text(self, tokens: list[int]) -> str:
        """Generated tokens, without their EOS, as the text of an answer, with its thinking tags."""
        return self.encoder.processor.tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def gives(self, messages: Messages, tokens: list[int]) -> bool:
        """Whether tokenising `messages`, which end with an answer's text, gives the answer's tokens again.

        Raises Unusable if tokenize_chat would drop the sample for its answer.
        """
        prompt = self.encoder.prompt(messages[:-1]).tolist()
        input_ids = self.encoder.encode(messages).input_ids.tolist()
        return input_ids[: len(prompt) + len(tokens)] == [*prompt, *tokens]

    def count(self, messages: Messages) -> int:
        """Tokens of the last answer in tokenize_chat, EOS included. Raises Unusable."""
        encoded = self.encoder.encode(messages)
        return int(encoded.loss_mask[encoded.prompt_tokens :].sum())

    def length(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.encoder.processor.tokenizer.encode(text, add_special_tokens=False))
