"""Anchors of a sequence, and what the slots behind them must predict.

Legend: S sequence length, A anchors, K block size.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def draw_anchors(loss_mask_S: Tensor, num_anchors: int, *, seed: int, epoch: int, sample: int) -> Tensor:
    """Up to num_anchors positions p with p and p + 1 in the loss mask, int64 [A], ascending, without replacement.

    The draw depends on (seed, epoch, sample) and the loss mask alone: it is the same in every batch and on every rank.
    The last position but one counts as well: a block that runs over the end keeps its valid slots.
    """
    eligible = (loss_mask_S[:-1] & loss_mask_S[1:]).nonzero().squeeze(1)
    digest = hashlib.sha256(f"{seed}/{epoch}/{sample}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    chosen = torch.randperm(len(eligible), generator=generator)[:num_anchors]
    return eligible[chosen].sort().values


def block_tokens(input_ids_S: Tensor, anchors_A: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """The noise blocks as ids, int64 [A, K]: the anchor's token in slot 0, the mask token in all others."""
    blocks_AK = torch.full((len(anchors_A), block_size), mask_token_id, dtype=torch.int64)
    blocks_AK[:, 0] = input_ids_S[anchors_A]
    return blocks_AK


def block_labels(input_ids_S: Tensor, anchors_A: Tensor, block_size: int) -> Tensor:
    """The token at anchor + k for every slot k, int64 [A, K]; 0 behind the end, where the weight is 0 as well."""
    positions_AK = anchors_A[:, None] + torch.arange(block_size)
    inside_AK = positions_AK < len(input_ids_S)
    return torch.where(inside_AK, input_ids_S[positions_AK.clamp(max=len(input_ids_S) - 1)], 0)
