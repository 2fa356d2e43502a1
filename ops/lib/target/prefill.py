"""The target's forward pass over a batch of prompts.

Prompts of different lengths are padded on the left, so that the last column holds every prompt's last token. That
side is exact for all families: attention masks the padding, positions are counted without it, and a linear-attention
layer, whose state starts at zero, stays there while it reads zeroes (padding behind a prompt would decay its state).

Padding on the left sees nothing, and the softmax over nothing is not a number on some devices and kernels, and in some
dtypes. It would stay in the cache, where even a weight of zero spreads it. So here transformers' masks for "sdpa" and
"eager" let a token that sees nothing see itself; no token sees that one.

The masks are replaced for the whole process, when this module is imported. A name of its own beside "sdpa" would not
do: some models look "sdpa" up in tables of their own or compare with it, in transformers and in checkpoints' code.
Masks without a row that sees nothing are bit for bit those of transformers, so that nothing else in the process
changes.

    B batch, S longest prompt, V vocabulary, Q queries, C keys
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from transformers import AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from ops.lib.target.cache import added_mask
from ops.lib.target.chunked_prefill import last_output, text_positions
from ops.lib.target.model import Target
from ops.lib.vision.batch import ModelInputs


@frozen(eq=False)
class Prefill:
    """A cache that holds the prompts, and the logits of the next token.

    mask_BS: 1 where the cache holds a token. offset_B: the difference between the next position and the number of
    tokens in a row (an image takes fewer positions than tokens).
    """

    cache: DynamicCache
    logits_BV: Tensor
    mask_BS: Tensor
    offset_B: Tensor


def prefill(target: Target, prompts: ModelInputs, cache: DynamicCache) -> Prefill:
    """Run the prompts, padded on either side, through the target, into an empty cache; long ones in chunks."""
    inputs = pad_left(prompts)
    mask_BS = inputs.attention_mask
    # Three-dimensional positions of images are the model's own affair; those of text would count the padding.
    given = {} if inputs.has_images and target.family.has_own_positions else {"position_ids": text_positions(mask_BS)}
    output = last_output(target, inputs, cache, **given)
    offset_B = torch.zeros(len(mask_BS), dtype=torch.int64, device=mask_BS.device)
    return Prefill(cache, output.logits[:, -1], mask_BS, offset_B + target.family.position_offsets(target.model))


def pad_left(inputs: ModelInputs) -> ModelInputs:
    """A batch with its padding moved from the right to the left."""
    shifts = (inputs.input_ids.shape[1] - inputs.attention_mask.sum(dim=1)).tolist()

    def moved(tensor_BS: Tensor) -> Tensor:
        return torch.stack([row.roll(shift) for row, shift in zip(tensor_BS, shifts, strict=True)])

    return evolve(
        inputs,
        input_ids=moved(inputs.input_ids),
        attention_mask=moved(inputs.attention_mask),
        loss_mask=moved(inputs.loss_mask),
    )


def mask_with_diagonal(*, q_offset: int = 0, kv_offset: int = 0, **others: Any) -> Tensor | None:
    """The mask of transformers' `sdpa_mask`, in which a row that sees nothing sees its own diagonal.

    bool [B, 1, Q, C], or None for the causal mask. Takes the arguments of `sdpa_mask`; other rows stay as they are.
    """
    mask_B1QC = sdpa_mask(q_offset=q_offset, kv_offset=kv_offset, **others)
    if mask_B1QC is None:
        return None
    query_Q1 = torch.arange(mask_B1QC.shape[2], device=mask_B1QC.device)[:, None] + q_offset
    key_C = torch.arange(mask_B1QC.shape[3], device=mask_B1QC.device) + kv_offset
    return mask_B1QC | ((query_Q1 == key_C) & ~mask_B1QC.any(-1, keepdim=True))


def added_mask_with_diagonal(*, dtype: torch.dtype = torch.float32, **others: Any) -> Tensor | None:
    """transformers' `eager_mask`, [B, 1, Q, C] or None where every token sees all, with no row that sees nothing."""
    mask_B1QC = mask_with_diagonal(**{**others, "allow_is_causal_skip": False})
    return None if mask_B1QC is None else added_mask(mask_B1QC, dtype)


AttentionMaskInterface.register("sdpa", mask_with_diagonal)
AttentionMaskInterface.register("eager", added_mask_with_diagonal)
