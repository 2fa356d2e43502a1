"""What is counted over blocks, per step and for the val split, and the metrics made of it.

A tally is a float64 vector: sums that add over micro-batches, ranks and steps alike. Legend: K block size.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOSS, WEIGHT, TOKENS, ANCHORS, ANCHORLESS, FLOPS, HEAD = 0, 1, 2, 3, 4, 5, 6


def new_tally(block_size: int) -> Tensor:
    """Zeros: the loss's numerator and denominator, context tokens, anchors, samples without one, floating-point
    operations, and correct and seen of slots 1..K-1.
    """
    return torch.zeros(HEAD + 2 * (block_size - 1), dtype=torch.float64)


def count_slots(tally: Tensor, slots_W: Tensor, correct_W: Tensor) -> None:
    """Add weighted slots, numbered from 1, and which of them were predicted right."""
    block_size = (len(tally) - HEAD) // 2 + 1
    seen = torch.bincount(slots_W, minlength=block_size)[1:]
    correct = torch.bincount(slots_W[correct_W], minlength=block_size)[1:]
    tally[HEAD:] += torch.cat((correct, seen)).double()


def mean_loss(tally: Tensor) -> float:
    """Numerator over denominator; 0 where nothing was weighed."""
    return float(tally[LOSS] / tally[WEIGHT]) if tally[WEIGHT] > 0 else 0.0


def slot_accuracy(tally: Tensor) -> list[float]:
    """Share of right predictions of slots 1..K-1; 0 for a slot that no block reached."""
    correct, seen = tally[HEAD:].chunk(2)
    return (correct / seen.clamp(min=1)).tolist()


def accuracy(tally: Tensor) -> float:
    """Share of right predictions over all slots."""
    correct, seen = tally[HEAD:].chunk(2)
    return float(correct.sum() / seen.sum().clamp(min=1))


def expected_tau(tally: Tensor) -> float:
    """1 + sum over k of the product of the accuracies of slots 1..k: tau if slots were right independently."""
    return 1.0 + float(torch.tensor(slot_accuracy(tally), dtype=torch.float64).cumprod(0).sum())


def metrics(tally: Tensor, group: str) -> dict[str, float]:
    """loss, accuracy and expected_tau under a group's name."""
    return {
        f"{group}/loss": mean_loss(tally),
        f"{group}/accuracy": accuracy(tally),
        f"{group}/expected_tau": expected_tau(tally),
    }
