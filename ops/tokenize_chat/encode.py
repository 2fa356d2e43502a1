"""One conversation into token ids and a loss mask.

The conversation is rendered once by the chat template, its image placeholders are expanded in the text, and the text
is tokenised once; what belongs to an answer is found by character offsets. Tokenising a prefix again could cut words
otherwise, and many templates lack `{% generation %}` marks.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from jinja2 import TemplateError
from torch import Tensor

from dsl.errors import DataError
from ops.vision.processor import Processor

SPECIAL_IN_TEXT = "special token in the text"
NO_TOKEN_BOUNDARY = "answer begins inside a token"
REFUSED_BY_TEMPLATE = "refused by the chat template"


class Unusable(Exception):
    """A sample cannot be tokenised; the message is the reason to drop it."""


@frozen(eq=False)
class Encoded:
    """input_ids int64 [S]; loss_mask bool [S], true on every answer and the EOS token that closes it; prompt_tokens:
    tokens up to and with the generation prompt of the last answer.
    """

    input_ids: Tensor
    loss_mask: Tensor
    prompt_tokens: int


def encode(processor: Processor, messages: list[dict[str, Any]], image_tokens: int, sample_id: str) -> Encoded:
    """Tokenise chat messages whose image, if any, becomes `image_tokens` tokens.

    Raises Unusable for a sample at fault, and DataError, with the sample's id, where the chat template is.
    """
    if any(token in text for text in _texts(messages) for token in processor.special_tokens):
        raise Unusable(SPECIAL_IN_TEXT)
    text = _expand(processor, _render(processor, messages), image_tokens)
    encoded = processor.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    found = ids.count(processor.image_token_id) if processor.image_token_id is not None else 0
    if found != image_tokens:
        raise DataError(
            f'sample "{sample_id}": the chat template of {processor.source} gives {found} image tokens, '
            f"the image processor {image_tokens}; do template and image processor belong together?"
        )
    loss_mask = torch.zeros(len(ids), dtype=torch.bool)
    prompt_tokens = 0
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(_prefix(processor, messages[:turn], text, image_tokens, sample_id))
            prompt_tokens, end = _answer(processor, ids, offsets, start, sample_id)
            shown = text[offsets[prompt_tokens][0] : offsets[end - 1][0]]
            if "".join(_texts([message])).strip() not in shown:
                raise DataError(f'sample "{sample_id}": the chat template of {processor.source} changes the answer')
            loss_mask[prompt_tokens:end] = True
    return Encoded(torch.tensor(ids, dtype=torch.int64), loss_mask, prompt_tokens)


def _answer(
    processor: Processor, ids: list[int], offsets: list[tuple[int, int]], start: int, sample_id: str
) -> tuple[int, int]:
    """First token of the answer that begins at character `start`, and the token after its EOS."""
    first = next((place for place, (_, end) in enumerate(offsets) if end > start), len(ids))
    if first < len(ids) and offsets[first][0] < start:
        raise Unusable(NO_TOKEN_BOUNDARY)
    for place in range(first, len(ids)):
        if ids[place] in processor.eos_token_ids:
            return first, place + 1
    raise DataError(
        f'sample "{sample_id}": the chat template of {processor.source} closes an answer with none of the EOS tokens '
        f"{list(processor.eos_token_ids)}"
    )


def _prefix(processor: Processor, messages: list[dict[str, Any]], text: str, image_tokens: int, sample_id: str) -> str:
    """The text up to and with the generation prompt after `messages`, which the whole text must begin with."""
    prefix = _expand(processor, _render(processor, messages, add_generation_prompt=True), image_tokens)
    if not text.startswith(prefix):
        raise DataError(
            f'sample "{sample_id}": the chat template of {processor.source} renders {len(messages)} messages with its '
            "generation prompt other than at the start of the whole conversation, so the answers cannot be found"
        )
    return prefix


def _render(processor: Processor, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
    """The chat template's text; text-only processors get plain strings, as their templates expect."""
    if processor.image_processor is None:
        messages = [{**message, "content": "".join(_texts([message]))} for message in messages]
    try:
        return processor.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except TemplateError as error:  # e.g. a template that knows no system role, or wants the roles to alternate
        raise Unusable(REFUSED_BY_TEMPLATE) from error


def _expand(processor: Processor, text: str, image_tokens: int) -> str:
    """The placeholder of the image, repeated as often as the image has tokens."""
    if not image_tokens:
        return text
    return text.replace(processor.image_token, processor.image_token * image_tokens)


def _texts(messages: list[dict[str, Any]]) -> list[str]:
    return [part["text"] for message in messages for part in message["content"] if part["type"] == "text"]
