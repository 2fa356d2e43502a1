"""What a training of DSpark may set: the table `dspark` of train_dflash."""

from __future__ import annotations

from typing import Any

from attrs import frozen, validators

from dsl.op import field


def _objective(instance: Any, _attribute: object, weight: float) -> None:
    """Something is trained, and no confidence head is exported as it was made."""
    has_head = getattr(instance, "confidence_head", False)
    if weight == 0 and has_head:
        raise ValueError("confidence = 0 trains no confidence head: set confidence_head = false")
    if not has_head and getattr(instance, "base", 1.0) == 0 and getattr(instance, "l1", 1.0) == 0:
        raise ValueError("base = 0 and l1 = 0 without a confidence head leave nothing to train for: one must be > 0")


@frozen(kw_only=True)
class DsparkOptions:
    """Sizes, layout and terms of the loss. With l1 = 0 and confidence_head = false no final_hidden is needed."""

    rank: int = field(default=256, validator=validators.ge(1), help="of the two tables that hold the bias")
    sample_from_anchor: bool = field(
        default=True,
        help="the anchor's slot predicts too, so a block has one slot less; false: the layout of plain DFlash",
    )
    confidence_head: bool = field(default=True, help="a head for the probability that a proposal is accepted")
    base: float = field(default=0.1, validator=validators.ge(0), help="weight of `loss`")
    l1: float = field(
        default=0.9, validator=validators.ge(0), help="weight of the distance to the target's distribution"
    )
    confidence: float = field(
        default=1.0,
        validator=validators.and_(validators.ge(0), _objective),
        help="weight of the confidence head's loss; above 0 unless confidence_head = false",
    )

    @property
    def needs_teacher(self) -> bool:
        return self.l1 > 0 or self.confidence_head

    def sizes(self) -> dict[str, Any]:
        """The fields of the algorithm's config."""
        return {
            "rank": self.rank,
            "sample_from_anchor": self.sample_from_anchor,
            "confidence_head": self.confidence_head,
        }
