"""Counts over blocks, per step and for the val split, and their metrics.

A tally is a float64 vector of sums over micro-batches, ranks and steps. During a step it is on the device, so that
adding to it does not wait; its counts are exact in any order. `found` are the names of the metrics that the draft's
algorithm finds of every slot, as many as it has. Legend: K block size, W slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.lib.drafts.backbone.step import Slots

LOSS, WEIGHT, TOKENS, ANCHORS, ANCHORLESS, FLOPS, HEAD = 0, 1, 2, 3, 4, 5, 6
OF_SLOTS = ("correct", "seen", "loss")  # then the algorithm's metrics: from HEAD on, K - 1 sums of each


def new_tally(block_size: int, found: Sequence[str], device: torch.device | None = None) -> Tensor:
    """A tally of zeros: a vector of sums over slots and samples.

    It has the loss's numerator and denominator, context tokens, anchors, samples without one, and FLOPs. For slots
    1..K-1 it has the numbers of correct and of seen ones, their losses, and the algorithm's metrics.
    """
    sums = (len(OF_SLOTS) + len(found)) * (block_size - 1)
    return torch.zeros(HEAD + sums, dtype=torch.float64, device=device)


def count_slots(tally: Tensor, slots: Slots) -> None:
    """Add the results of weighted slots to a tally."""
    values_W = (slots.correct_W, torch.ones_like(slots.correct_W), slots.losses_W, *slots.found)
    values = torch.stack([each_W.to(tally.device, tally.dtype) for each_W in values_W])
    tally[HEAD:].view(len(values), -1).index_add_(1, slots.slots_W.to(tally.device) - 1, values)


def mean_loss(tally: Tensor) -> float:
    """The mean loss, numerator over denominator; 0 if nothing was weighted."""
    return float(tally[LOSS] / tally[WEIGHT]) if tally[WEIGHT] > 0 else 0.0


def slot_accuracy(tally: Tensor, found: Sequence[str]) -> list[float]:
    """The share of correct predictions of each slot 1..K-1; 0 for a slot that no block reached."""
    return slot_means(tally, found)["accuracy"]


def slot_means(tally: Tensor, found: Sequence[str]) -> dict[str, list[float]]:
    """The mean accuracy, loss and algorithm's metrics of slots 1..K-1; 0 for a slot that no block reached.

    The loss is that of the slot before weighting, with the algorithm's own terms.
    """
    correct, seen, *others = _sums(tally, found)
    named = zip(("accuracy", "loss", *found), (correct, *others), strict=True)
    return {name: (sums / seen.clamp(min=1)).tolist() for name, sums in named}


def accuracy(tally: Tensor, found: Sequence[str]) -> float:
    """The share of correct predictions over all slots."""
    correct, seen, *_ = _sums(tally, found)
    return float(correct.sum() / seen.sum().clamp(min=1))


def expected_tau(tally: Tensor, found: Sequence[str]) -> float:
    """The expected tau if slots were right independently.

    It is 1 + the sum over k of the product of the accuracies of slots 1..k.
    """
    return 1.0 + float(torch.tensor(slot_accuracy(tally, found), dtype=torch.float64).cumprod(0).sum())


def found_means(tally: Tensor, found: Sequence[str]) -> dict[str, float]:
    """The means of the algorithm's metrics over all slots."""
    _correct, seen, _loss, *others = _sums(tally, found)
    return {name: float(sums.sum() / seen.sum().clamp(min=1)) for name, sums in zip(found, others, strict=True)}


def metrics(tally: Tensor, group: str, found: Sequence[str]) -> dict[str, float]:
    """The metrics loss, accuracy, expected_tau and the algorithm's, as means over all slots, under a group's name."""
    return {
        **{f"{group}/{name}": mean for name, mean in found_means(tally, found).items()},
        f"{group}/loss": mean_loss(tally),
        f"{group}/accuracy": accuracy(tally, found),
        f"{group}/expected_tau": expected_tau(tally, found),
    }


def _sums(tally: Tensor, found: Sequence[str]) -> Tensor:
    """The sums for each slot, [3 + metrics, K - 1]."""
    return tally[HEAD:].view(len(OF_SLOTS) + len(found), -1)
