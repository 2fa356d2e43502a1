"""The bias has as many columns as a block has proposals. No engine serves it, so nothing is known of wrong fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen, validators

from dsl.op import field
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.layout import Layout, masks_first

SCALE = "slot_bias_scale"


@frozen(kw_only=True)
class SlotBias:
    """The config of the algorithm. scale: the factor of the bias."""

    scale: float = 1.0

    name: ClassVar[str] = "slot_bias"
    architecture: ClassVar[str] = "SlotBiasDraftModel"
    engine: ClassVar[str] = ""  # no server knows it
    source: ClassVar[str] = ""

    def layout(self, block_size: int) -> Layout:
        return masks_first(block_size)

    def metrics(self, with_teacher: bool) -> tuple[str, ...]:
        return ("bias_size",)

    def mistakes(self, draft: DraftConfig) -> list[str]:
        return [] if self.scale > 0 else [f"{SCALE}: must be positive, got {self.scale}"]

    def to_serving(self, serving: dict[str, Any]) -> dict[str, Any]:
        return serving | {SCALE: self.scale}

    @classmethod
    def from_serving(cls, data: Mapping[str, Any]) -> tuple[SlotBias, dict[str, Any]]:
        return cls(scale=data[SCALE]), {name: value for name, value in data.items() if name != SCALE}

    def slot_flops(self, draft: DraftConfig) -> float:
        return 3 * 2 * (draft.block_size - 1) * draft.vocab_size


MISSING: Mapping[str, str] = {}
WRONG: Mapping[str, str] = {}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that the algorithm adds, by name. config: a config.json."""
    return {"slot_bias.table": (config["vocab_size"], config["block_size"] - 1)}


@frozen(kw_only=True)
class SlotBiasOptions:
    """The options of a training. scale: of the bias.

    penalty: the weight of the bias's mean square in the loss. base: the weight of the field `loss`.
    """

    scale: float = field(default=1.0, validator=validators.gt(0))
    penalty: float = field(default=0.01, validator=validators.ge(0))
    base: float = 1.0

    @property
    def needs_teacher(self) -> bool:
        return False

    def sizes(self) -> dict[str, Any]:
        return {"scale": self.scale}
