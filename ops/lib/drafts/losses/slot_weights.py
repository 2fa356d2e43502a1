"""How much the slots behind an anchor weigh in the loss.

Legend: S sequence length, A anchors, K block size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsl.errors import ConfigError

_GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}


def block_weights(block_size: int, gamma: float | None = None) -> Tensor:
    """Loss weight of each slot of a block, float32 [K].

    w[0] = 0 (the anchor is given), w[k] = exp(-(k - 1) / gamma). gamma is 7 / 5 / 4 for block sizes 16 / 10 / 8 and
    half the block size for others, unless given.
    Source: DFlash, arXiv 2602.06036, section 4.2. Raises ConfigError if gamma <= 0.
    """
    gamma = _GAMMAS.get(block_size, block_size / 2) if gamma is None else gamma
    if gamma <= 0:
        raise ConfigError(f"gamma: must be positive, got {gamma}")
    weights_K = torch.exp(-(torch.arange(block_size, dtype=torch.float32) - 1) / gamma)
    weights_K[0] = 0
    return weights_K


def slot_weights(loss_mask_S: Tensor, anchors_A: Tensor, weights_K: Tensor) -> Tensor:
    """Weight of every slot of every block, float32 [A, K].

    Once a slot lies outside the loss mask or behind the end, the later slots of its block are out as well, because
    serving stops there.
    """
    positions_AK = anchors_A[:, None] + torch.arange(len(weights_K))
    valid_AK = positions_AK < len(loss_mask_S)
    valid_AK = valid_AK & loss_mask_S[positions_AK.clamp(max=len(loss_mask_S) - 1)]
    return weights_K * valid_AK.cumprod(dim=1)
