"""What a training of DFlash2 may set: the table `dflash2` of train_dflash."""

from __future__ import annotations

from typing import Any, Literal

from attrs import frozen, validators

from dsl.op import field
from ops.lib.drafts.dflash2.config import POWER_OF_2

AT_LEAST_1 = validators.ge(1)


def _power_of_2(_instance: Any, _attribute: object, count: int) -> None:
    if count & (count - 1):
        raise ValueError(f"'candidates' {POWER_OF_2}: {count}")


def _objective(instance: Any, _attribute: object, selector: float) -> None:
    if selector == 0 and getattr(instance, "base", 1.0) == 0:
        raise ValueError("base = 0 and selector = 0 leave nothing to train for: one of them must be > 0")


@frozen(kw_only=True)
class Dflash2Options:
    """Sizes and terms of the loss."""

    taps: int = field(default=2, validator=AT_LEAST_1, help="slots that a convolution reads, the own one among them")
    group: int = field(default=16, validator=AT_LEAST_1, help="dimensions that share a kernel made of the slot")
    rank: int = field(default=256, validator=AT_LEAST_1, help="of the selector's tables")
    candidates: int = field(
        default=16,
        validator=validators.and_(AT_LEAST_1, _power_of_2),
        help="tokens of each slot that the selector chooses among, a power of two",
    )
    base: float = field(default=1.0, validator=validators.ge(0), help="weight of `loss`, that of the plain logits")
    selector: float = field(
        default=1.0,
        validator=validators.and_(validators.ge(0), _objective),
        help="weight of the selector's cross-entropy over the candidates",
    )
    label: Literal["data", "target"] = field(
        default="data",
        help="what the selector learns to choose: the token of the data, or the target's most probable one (needs "
        "final_hidden)",
    )
    missing: Literal["replace", "skip"] = field(
        default="replace",
        help="a label that is no candidate: it replaces the last one, in training only, or adds nothing to this term",
    )

    @property
    def needs_teacher(self) -> bool:
        return self.label == "target"

    def sizes(self) -> dict[str, Any]:
        """The fields of the algorithm's config."""
        return {"taps": self.taps, "group": self.group, "rank": self.rank, "candidates": self.candidates}
