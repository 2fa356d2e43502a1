"""Names of the losses, and which of them compare the draft with the target; torch-free, for ops and plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

LossKind = Literal["dflash", "dpace", "focal", "kl", "l1", "lk", "nla"]

OF_TEACHER: tuple[LossKind, ...] = ("kl", "l1", "lk", "nla")


class Terms(Protocol):
    """A base class of an algorithm's table in train_dflash. base: weight of the standard loss beside its own terms."""

    @property
    def base(self) -> float: ...
    @property
    def needs_teacher(self) -> bool: ...
    def sizes(self) -> Mapping[str, Any]:
        """The values of the algorithm's config fields, by name."""


def needs_teacher(kind: LossKind, terms: Terms | None = None) -> bool:
    """Whether a loss needs the target's distribution, computed from its final hidden states; other losses need labels
    only.
    """
    return kind in OF_TEACHER or (terms is not None and terms.needs_teacher)


def needs_divergence(kind: LossKind) -> bool:
    """Whether a part of the loss is the divergence from the target's distribution."""
    return kind in ("kl", "lk")
