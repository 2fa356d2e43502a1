"""Anchors of a sequence, what the slots behind them must predict, and how much each slot weighs in the loss.

Legend: S sequence length, A anchors, N blocks, K block size, W weighted slots.
"""

from __future__ import annotations

import hashlib

import torch
from attrs import frozen
from torch import Tensor

from dsl.errors import ConfigError


def draw_anchors(loss_mask_S: Tensor, num_anchors: int, *, seed: int, epoch: int, sample: int) -> Tensor:
    """Up to num_anchors random positions p with p and p + 1 in the loss mask, int64 [A], ascending, all different.

    The draw depends only on (seed, epoch, sample) and the loss mask, so it is the same in every batch and on every
    rank. A block may run over the end, and keeps its valid slots.
    """
    eligible = (loss_mask_S[:-1] & loss_mask_S[1:]).nonzero().squeeze(1)
    digest = hashlib.sha256(f"{seed}/{epoch}/{sample}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    chosen = torch.randperm(len(eligible), generator=generator)[:num_anchors]
    return eligible[chosen].sort().values


def block_tokens(input_ids_S: Tensor, anchors_A: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """The input tokens of the blocks, int64 [A, K]: the anchor's token in slot 0, the mask token in all others."""
    blocks_AK = torch.full((len(anchors_A), block_size), mask_token_id, dtype=torch.int64)
    blocks_AK[:, 0] = input_ids_S[anchors_A]
    return blocks_AK


def block_labels(input_ids_S: Tensor, anchors_A: Tensor, block_size: int) -> Tensor:
    """The token at anchor + k for every slot k, int64 [A, K]; 0 past the end, where the weight is 0 as well."""
    positions_AK = anchors_A[:, None] + torch.arange(block_size)
    inside_AK = positions_AK < len(input_ids_S)
    return torch.where(inside_AK, input_ids_S[positions_AK.clamp(max=len(input_ids_S) - 1)], 0)


_GAMMAS = {17: 7.0, 16: 7.0, 10: 5.0, 8: 4.0}  # the first for 16 proposals, which DSpark's layout makes of 16 slots


def block_weights(block_size: int, gamma: float | None = None) -> Tensor:
    """The loss weight of each slot of a block, float32 [K].

    w[0] = 0 (the anchor is given), w[k] = exp(-(k - 1) / gamma). gamma defaults to 7 / 5 / 4 for block sizes 16 and 17
    / 10 / 8, and to half the block size for others. Sources: DFlash, arXiv 2602.06036, section 4.2; for 17, ModelOpt's
    DSpark with 16 proposals. Raises ConfigError if gamma <= 0.
    """
    gamma = _GAMMAS.get(block_size, block_size / 2) if gamma is None else gamma
    if gamma <= 0:
        raise ConfigError(f"gamma: must be positive, got {gamma}")
    weights_K = torch.exp(-(torch.arange(block_size, dtype=torch.float32) - 1) / gamma)
    weights_K[0] = 0
    return weights_K


def slot_weights(loss_mask_S: Tensor, anchors_A: Tensor, weights_K: Tensor) -> Tensor:
    """Weight of every slot of every block, float32 [A, K].

    After a slot outside the loss mask or past the end, the later slots of its block have no weight either, because
    serving stops there.
    """
    positions_AK = anchors_A[:, None] + torch.arange(len(weights_K))
    valid_AK = positions_AK < len(loss_mask_S)
    valid_AK = valid_AK & loss_mask_S[positions_AK.clamp(max=len(loss_mask_S) - 1)]
    return weights_K * valid_AK.cumprod(dim=1)


@frozen(eq=False)
class Weighted:
    """The weighted slots of some blocks.

    rows_W: n * K + k of each, int64, ascending, on the computing device. before: before[n] is the number of weighted
    slots in the first n blocks, n = 0..N. least, most: the smallest and the largest label of all slots.
    """

    rows_W: Tensor
    before: tuple[int, ...]
    least: int
    most: int

    @classmethod
    def of(cls, labels_NK: Tensor, weights_NK: Tensor) -> Weighted:
        """Find the weighted slots of N >= 1 blocks, on the device of the weights, from labels and weights.

        It waits for a device other than the CPU.
        """
        weighted_NK = weights_NK > 0
        rows_W = weighted_NK.flatten().nonzero().squeeze(1)
        before = (0, *weighted_NK.sum(dim=1).cumsum(0).tolist())
        least, most = (int(bound) for bound in labels_NK.aminmax())
        return cls(rows_W, before, least, most)

    def rows(self, start: int, end: int) -> Tensor:
        """The rows of the weighted slots in the blocks [start, end)."""
        return self.rows_W[self.before[start] : self.before[end]]

    def check(self, vocabulary: int) -> None:
        """Check that all labels are valid tokens. Raises IndexError."""
        if self.least < 0 or self.most >= vocabulary:
            raise IndexError(f"labels from {self.least} to {self.most} do not fit a vocabulary of {vocabulary}")
