"""Chunked prefill: texts run through the target in parts, where attention's masks or scores would be too large.

With padding or a sliding window, attention reads a mask [B, 1, S, S]; eager attention holds all scores, [B, H, S, S].
Both grow with the square of the length. Above MOST_BYTES the tokens run in chunks over a cache instead, so that they
are [B, 1, C, S] and [B, H, C, S]. The result differs from that of one pass by rounding only.

One pass takes texts whose attention needs neither, texts with images, and targets with layers whose cache is not one
key and value for each token.

    B batch, S longest text, C tokens of a chunk, H query heads, M hidden size
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ops.lib.target.cache import attention_of, decoder_config, keeps_all_columns, own_cache, whole_cache, windows_of
from ops.lib.target.model import Target
from ops.lib.target.sizes import LEAST_CHUNK, MASK_BYTES, MOST_BYTES, SCORE_BYTES
from ops.lib.vision.batch import ModelInputs


def hidden_states(target: Target, inputs: ModelInputs) -> Tensor:
    """The states of `Target.hidden`, [B, S, M], for inputs padded on either side."""
    length = chunk_length(target, inputs)
    if length is None:
        return target.hidden(inputs)
    model = target.model.base_model
    chunks = _chunks(target, model, inputs, length, own_cache(target))
    return torch.cat([output.last_hidden_state for output in chunks], dim=1)


def last_output(target: Target, inputs: ModelInputs, cache: DynamicCache, **given: Any) -> Any:
    """The model's output for the last column of inputs padded on the left, which fill an empty cache.

    given: further arguments of a single pass over everything.
    """
    length = chunk_length(target, inputs)
    if length is None:
        return target.forward(inputs, **given, past_key_values=cache, use_cache=True, logits_to_keep=1)
    *_, last = _chunks(target, target.model, inputs, length, cache, logits_to_keep=1)
    return last


def chunk_length(target: Target, inputs: ModelInputs) -> int | None:
    """The tokens of a chunk; None where one pass is in place."""
    rows, longest = inputs.input_ids.shape
    config, attention = decoder_config(target), attention_of(target)
    size = config.num_attention_heads * SCORE_BYTES if attention == "eager" else MASK_BYTES
    if rows * longest**2 * size <= MOST_BYTES or inputs.has_images or attention not in ("eager", "sdpa"):
        return None
    windows = windows_of(config)
    if windows is None or not keeps_all_columns(whole_cache(target)):
        return None
    is_masked = any(window is not None and window < longest for window in windows.values())
    if attention == "sdpa" and not is_masked and bool(inputs.attention_mask.all()):
        return None
    return max(LEAST_CHUNK, MOST_BYTES // (rows * longest * size))


def text_positions(mask_BS: Tensor) -> Tensor:
    """The position of each token of padded texts without images, int64 [B, S]; 0 for padding before a text."""
    return (mask_BS.cumsum(-1) - 1).clamp(min=0)


def _chunks(
    target: Target, model: Any, inputs: ModelInputs, length: int, cache: DynamicCache, **options: Any
) -> Iterator[Any]:
    """The output of each chunk. What the target's layers record of it stands behind that of the chunk before."""
    target.forget_positions()
    positions_BS = text_positions(inputs.attention_mask)
    try:
        for start in range(0, positions_BS.shape[1], length):
            target.is_continued = start > 0
            yield model(
                input_ids=inputs.input_ids[:, start : start + length],
                attention_mask=inputs.attention_mask[:, : start + length],
                position_ids=positions_BS[:, start : start + length],
                past_key_values=cache,
                use_cache=True,
                **options,
            )
    finally:
        target.is_continued = False
