"""The sizes and the layout of DSpark, and their form in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

from ops.lib.drafts.layout import Layout, anchor_first, masks_first

if TYPE_CHECKING:
    from ops.lib.drafts.backbone.config import DraftConfig

NEST = "dflash_config"
HEAD = "vanilla"  # the kind of Markov head
TOP = ("mask_token_id", "target_layer_ids")  # at the top level, and not nested
OWN = (
    *("markov_rank", "markov_head_type", "sample_from_anchor"),
    *("enable_confidence_head", "confidence_head_with_markov"),
)


@frozen(kw_only=True)
class Dspark:
    """rank: of the tables that hold the bias. sample_from_anchor: the anchor's slot predicts too. confidence_head: one
    is trained beside it.
    """

    rank: int = 256
    sample_from_anchor: bool = True
    confidence_head: bool = True

    name: ClassVar[str] = "dspark"
    architecture: ClassVar[str] = "Qwen3DSparkModel"
    engine: ClassVar[str] = "DSPARK"
    speculators_type: ClassVar[str] = "dspark"
    speculators_architecture: ClassVar[str] = "DSparkSpeculator"
    source: ClassVar[str] = "https://arxiv.org/abs/2607.05147"

    def layout(self, block_size: int) -> Layout:
        return anchor_first(block_size) if self.sample_from_anchor else masks_first(block_size)

    def metrics(self, with_teacher: bool) -> tuple[str, ...]:
        return (("overlap", "confidence") if self.confidence_head else ("overlap",)) if with_teacher else ()

    def mistakes(self, draft: DraftConfig) -> list[str]:
        return [] if self.rank >= 1 else [f"dspark.rank (markov_rank): must be at least 1, got {self.rank}"]

    def to_serving(self, serving: dict[str, Any]) -> dict[str, Any]:
        """block_size counts proposals in both layouts, as SGLang reads it."""
        top = dict(serving)
        block_size = self.layout(serving["block_size"]).proposals
        return top | {**top.pop(NEST), "block_size": block_size, **self.to_speculators()}

    @classmethod
    def from_serving(cls, data: Mapping[str, Any]) -> tuple[Dspark, dict[str, Any]]:
        own = cls(
            rank=data["markov_rank"],
            sample_from_anchor=data["sample_from_anchor"],
            confidence_head=data["enable_confidence_head"],
        )
        plain = {name: value for name, value in data.items() if name not in (*TOP, *OWN)}
        return own, plain | {NEST: {name: data[name] for name in TOP}, "block_size": data["block_size"] + 1}

    def to_speculators(self) -> dict[str, Any]:
        return {
            "markov_rank": self.rank,
            "markov_head_type": HEAD,
            "sample_from_anchor": self.sample_from_anchor,
            "enable_confidence_head": self.confidence_head,
            "confidence_head_with_markov": self.confidence_head,
        }

    def parameters(self, draft: DraftConfig) -> int:
        confidence = draft.hidden_size + self.rank + 1 if self.confidence_head else 0
        return 2 * draft.vocab_size * self.rank + confidence

    def slot_floats(self, draft: DraftConfig) -> int:
        return 3 * self.rank + draft.hidden_size

    def slot_flops(self, draft: DraftConfig) -> float:
        return 3 * 2 * self.rank * draft.vocab_size


def sizes(draft: DraftConfig) -> Dspark:
    """The algorithm of a DSpark draft."""
    assert isinstance(draft.algorithm, Dspark)
    return draft.algorithm
