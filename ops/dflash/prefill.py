"""The target's forward pass over a batch of prompts.

Prompts of different lengths are padded on the left, so that the last column holds every prompt's last token. That
side is exact for all families: attention masks the padding, positions are counted without it, and a linear-attention
layer, whose state starts at zero, stays there while it reads zeroes (padding behind a prompt would decay its state).

    B batch, S longest prompt, V vocabulary
"""

from __future__ import annotations

import torch
from attrs import evolve, frozen
from torch import Tensor
from transformers import DynamicCache

from ops.load_target.model import Target
from ops.vision.batch import ModelInputs


@frozen(eq=False)
class Prefill:
    """A cache that holds the prompts, and the logits behind them.

    mask_BS: 1 where the cache holds a token. offset_B: how far the positions of what follows lie from the count of a
    row's tokens (an image takes fewer positions than tokens).
    """

    cache: DynamicCache
    logits_BV: Tensor
    mask_BS: Tensor
    offset_B: Tensor


def prefill(target: Target, prompts: ModelInputs) -> Prefill:
    """Run the prompts, padded on either side, through the target."""
    inputs = pad_left(prompts)
    mask_BS = inputs.attention_mask
    # Three-dimensional positions of images are the model's own affair; those of text would count the padding.
    given = {} if inputs.has_images else {"position_ids": (mask_BS.cumsum(-1) - 1).clamp(min=0)}
    cache = DynamicCache(config=target.model.config.get_text_config())
    output = target.forward(inputs, **given, past_key_values=cache, use_cache=True, logits_to_keep=1)
    offset_B = torch.zeros(len(mask_BS), dtype=torch.int64, device=mask_BS.device)
    return Prefill(cache, output.logits[:, -1], mask_BS, offset_B + target.family.position_offsets(target.model))


def pad_left(inputs: ModelInputs) -> ModelInputs:
    """The same batch with its padding moved from the right to the left."""
    shifts = (inputs.input_ids.shape[1] - inputs.attention_mask.sum(dim=1)).tolist()

    def moved(tensor_BS: Tensor) -> Tensor:
        return torch.stack([row.roll(shift) for row, shift in zip(tensor_BS, shifts, strict=True)])

    return evolve(
        inputs,
        input_ids=moved(inputs.input_ids),
        attention_mask=moved(inputs.attention_mask),
        loss_mask=moved(inputs.loss_mask),
    )
