"""Rows of the injected samples into token samples: text, images, and both combined."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from attrs import evolve
from torch import Tensor

from ops.lib.data.image_packs import read_packed
from ops.lib.data.sample_account import Unusable
from ops.lib.data.token_shards import TokenSample
from ops.lib.vision.chunks import ImageChunk, concatenate, place_images
from ops.lib.vision.images import TOO_LARGE, decode, size_of
from ops.lib.vision.processor import Processor
from ops.tokenize_chat.encode import ChatEncoder, Encoded, num_images
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.template import Messages, value_or_unusable

IMAGE_REFUSED = "image refused by the processor"
Name = TypeVar("Name", bound=Hashable)
TOO_LONG = "longer than max_length"
MOST_PIXELS = 1 << 29  # of the images of a sample: eight of the largest that inject_images takes by default
MOST_IMAGE_TOKENS = 1 << 15  # of a sample, where no max_length is set: about a gigabyte of pixel values
TOO_FEW_LOSS_TOKENS = "fewer than min_loss_tokens"


def tokenize_rows(
    rows: Sequence[dict[str, Any]], folder: Path, encoder: ChatEncoder, config: TokenizeChat
) -> list[TokenSample | Unusable]:
    """A sample of each row, or the reason to drop it.

    Turns after the last answer are omitted, with their images: nothing there is learnt, and a thinking template would
    treat the last answer as history.
    """
    if config.prompts_only:
        return [value_or_unusable(_prompt, row, folder, encoder, config) for row in rows]
    conversations = [up_to_last_answer(row["messages"]) for row in rows]
    cuts = [[reason == "length" for reason in row.get("finish_reasons", ())] for row in rows]  # if regenerated

    def sample(row: dict[str, Any], messages: Messages, encoded: Encoded) -> TokenSample:
        # Checked before the images are decoded, which takes longer and does not lower either count.
        check_length(len(encoded.input_ids), config.max_length)
        if encoded.loss_tokens < config.min_loss_tokens:
            raise Unusable(TOO_FEW_LOSS_TOKENS, f"{encoded.loss_tokens} of {config.min_loss_tokens}")
        images = load_images(
            row["images"][: sum(map(num_images, messages))],
            folder,
            encoder.processor,
            config.max_length,
            len(encoded.input_ids),
        )
        made = with_images(row["id"], encoded, images, encoder.processor)
        check_length(len(made.input_ids), config.max_length)
        return made

    encoded_rows = encoder.encode_batch(conversations, cuts, [row["id"] for row in rows])
    return [
        encoded if isinstance(encoded, Unusable) else value_or_unusable(sample, row, messages, encoded)
        for row, messages, encoded in zip(rows, conversations, encoded_rows, strict=True)
    ]


def _prompt(row: dict[str, Any], folder: Path, encoder: ChatEncoder, config: TokenizeChat) -> TokenSample:
    """A row up to its last user turn, for the target to answer. Raises Unusable."""
    turns = [turn for turn, message in enumerate(row["messages"]) if message["role"] == "user"]
    messages = row["messages"][: turns[-1] + 1]
    images = load_images(row["images"][: sum(map(num_images, messages))], folder, encoder.processor, config.max_length)
    sample = prompt_sample(row["id"], "image" if images else "text", messages, images, encoder)
    check_length(len(sample.input_ids), config.max_length)
    return sample


def up_to_last_answer(messages: Messages) -> Messages:
    """The messages up to the last answer; empty without one."""
    answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: answers[-1] + 1] if answers else ()


def check_length(tokens: int, max_length: int) -> None:
    """Samples are never cut. Raises Unusable for a sample that is too long."""
    if tokens > max_length:
        raise Unusable(TOO_LONG, f"{tokens} tokens")


def load_images(
    references: Sequence[Mapping[str, Any]],
    folder: Path,
    processor: Processor,
    max_length: int = MOST_IMAGE_TOKENS,
    text_tokens: int | None = None,
) -> list[ImageChunk]:
    """The images behind references into the packs of a folder. Raises Unusable as `load_each`.

    text_tokens: of the sample without its images, but for a placeholder of each.
    """
    packed = {str(reference["sha256"]): reference for reference in references}
    names = [str(reference["sha256"]) for reference in references]
    return load_each(names, lambda name: read_packed(folder, packed[name]), processor, max_length, text_tokens)


def load_each(
    names: Sequence[Name],
    read: Callable[[Name], bytes],
    processor: Processor,
    max_length: int = MOST_IMAGE_TOKENS,
    text_tokens: int | None = None,
) -> list[ImageChunk]:
    """The images of a sample, which `read` gives by name; those of one name are decoded once, since a row may name a
    large picture many times.

    Their tokens are counted from their headers, before one of them is decoded. Raises Unusable for an image that is
    refused, for a sample that is longer than max_length with them, and for more pixels than MOST_PIXELS.
    """
    tokens: dict[Name, int] = {}
    pixels = 0
    for name in dict.fromkeys(names):
        width, height = size_of(read(name))
        pixels += width * height
        if pixels > MOST_PIXELS:
            raise Unusable(TOO_LARGE, f"the images of the sample have more than {MOST_PIXELS} pixels together")
        try:
            tokens[name] = processor.image_tokens(width, height)
        except ValueError as error:
            raise Unusable(IMAGE_REFUSED, str(error)) from error
    text_only = len(names) if text_tokens is None else text_tokens
    check_length(text_only - len(names) + sum(tokens[name] for name in names), max_length)
    chunks = {name: load_image(read(name), processor) for name in tokens}
    return [chunks[name] for name in names]


def load_image(encoded: bytes, processor: Processor) -> ImageChunk:
    """An encoded image as the target's input. Raises Unusable for one that is refused."""
    image = decode(encoded)
    try:
        return ImageChunk.from_image(processor, image)
    except ValueError as error:
        raise Unusable(IMAGE_REFUSED, str(error)) from error


def prompt_sample(
    sample_id: str, category: str, messages: Messages, images: Sequence[ImageChunk], encoder: ChatEncoder
) -> TokenSample:
    """The target's input for answering `messages`: their turns and the generation prompt, with their images.

    Raises Unusable.
    """
    input_ids = encoder.prompt(messages, sample_id)
    prompt = Encoded(input_ids, torch.zeros(len(input_ids), dtype=torch.bool), 0, len(input_ids))
    return evolve(with_images(sample_id, prompt, images, encoder.processor), category=category)


def with_images(sample_id: str, encoded: Encoded, images: Sequence[ImageChunk], processor: Processor) -> TokenSample:
    """The sample with the tokens of each image in place of its placeholder; they are not learnt."""
    ids, mask, prompt_tokens = encoded.input_ids, encoded.loss_mask, encoded.prompt_tokens
    pixel_values, grids = _no_images(processor.patch_dim)
    if images:
        assert processor.image_token_id is not None  # no ImageChunk is made without
        prompted = int((ids[:prompt_tokens] == processor.image_token_id).sum())
        prompt_tokens += sum(image.num_tokens - 1 for image in images[:prompted])
        chunks = place_images(ids, mask, processor.image_token_id, images)
        placed = concatenate(chunks, processor.patch_dim)
        ids, mask = placed.input_ids, placed.loss_mask
        pixel_values, grids = placed.pixel_values, placed.image_grid_thw
    return TokenSample(
        id=sample_id,
        category="image" if images else "text",
        input_ids=ids,
        loss_mask=mask,
        pixel_values=pixel_values,
        image_grid_thw=grids,
        prompt_tokens=prompt_tokens,
    )


@lru_cache
def _no_images(patch_dim: int) -> tuple[Tensor, Tensor]:
    """float32 [0, patch_dim] and int64 [0, 3], which all samples of text share."""
    return torch.empty(0, patch_dim), torch.empty(0, 3, dtype=torch.int64)
