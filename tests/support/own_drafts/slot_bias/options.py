"""The table `own` of its training."""

from __future__ import annotations

from typing import Any

from attrs import frozen, validators

from dsl.op import field


@frozen(kw_only=True)
class SlotBiasOptions:
    """scale: of the bias. penalty: the weight of its mean square in the loss. base: the weight of the field `loss`."""

    scale: float = field(default=1.0, validator=validators.gt(0))
    penalty: float = field(default=0.01, validator=validators.ge(0))
    base: float = 1.0

    @property
    def needs_teacher(self) -> bool:
        return False

    def sizes(self) -> dict[str, Any]:
        return {"scale": self.scale}
