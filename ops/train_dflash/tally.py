"""Counts over blocks, per step and for the val split, and their metrics.

A tally is a float64 vector of sums over micro-batches, ranks and steps. During a step it is on the device, so that
adding to it does not wait; its counts are exact in any order. Legend: K block size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LOSS, WEIGHT, TOKENS, ANCHORS, ANCHORLESS, FLOPS, FOUND = 0, 1, 2, 3, 4, 5, 6
HEAD = FOUND + 4  # at most four metrics of an algorithm


def new_tally(block_size: int, device: torch.device | None = None) -> Tensor:
    """Zeros: the loss's numerator and denominator, context tokens, anchors, samples without one, floating-point
    operations, sums of the algorithm's metrics, and correct and seen of slots 1..K-1.
    """
    return torch.zeros(HEAD + 2 * (block_size - 1), dtype=torch.float64, device=device)


def count_slots(tally: Tensor, slots_W: Tensor, correct_W: Tensor) -> None:
    """Add weighted slots, numbered from 1, and which of them were predicted correctly."""
    seen = slots_W.to(tally.device) + (HEAD - 1)
    slots = (len(tally) - HEAD) // 2
    tally.index_add_(0, seen, correct_W.to(tally.device, tally.dtype))
    tally.index_add_(0, seen + slots, torch.ones_like(seen, dtype=tally.dtype))


def mean_loss(tally: Tensor) -> float:
    """Numerator over denominator; 0 if nothing was weighted."""
    return float(tally[LOSS] / tally[WEIGHT]) if tally[WEIGHT] > 0 else 0.0


def slot_accuracy(tally: Tensor) -> list[float]:
    """Share of correct predictions of slots 1..K-1; 0 for a slot that no block reached."""
    correct, seen = tally[HEAD:].chunk(2)
    return (correct / seen.clamp(min=1)).tolist()


def accuracy(tally: Tensor) -> float:
    """Share of correct predictions over all slots."""
    correct, seen = tally[HEAD:].chunk(2)
    return float(correct.sum() / seen.sum().clamp(min=1))


def expected_tau(tally: Tensor) -> float:
    """1 + sum over k of the product of the accuracies of slots 1..k: tau if slots were right independently."""
    return 1.0 + float(torch.tensor(slot_accuracy(tally), dtype=torch.float64).cumprod(0).sum())


def found_means(tally: Tensor, found: Sequence[str]) -> dict[str, float]:
    """The algorithm's metrics, means over all slots."""
    _correct, seen = tally[HEAD:].chunk(2)
    means = tally[FOUND : FOUND + len(found)] / seen.sum().clamp(min=1)
    return dict(zip(found, means.tolist(), strict=True))


def metrics(tally: Tensor, group: str, found: Sequence[str] = ()) -> dict[str, float]:
    """loss, accuracy and expected_tau under a group's name; found: the algorithm's metrics, means over all slots."""
    return {
        **{f"{group}/{name}": mean for name, mean in found_means(tally, found).items()},
        f"{group}/loss": mean_loss(tally),
        f"{group}/accuracy": accuracy(tally),
        f"{group}/expected_tau": expected_tau(tally),
    }
