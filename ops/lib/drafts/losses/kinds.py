"""Names of the losses, and which of them compare the draft with the target; torch-free, for ops and plans."""

from __future__ import annotations

from typing import Literal

LossKind = Literal["dflash", "dpace", "focal", "kl", "l1", "lk", "nla"]

OF_TEACHER: tuple[LossKind, ...] = ("kl", "l1", "lk", "nla")


def needs_teacher(kind: LossKind) -> bool:
    """Whether the loss reads the target's distribution, which its final hidden states give; the others read labels."""
    return kind in OF_TEACHER
