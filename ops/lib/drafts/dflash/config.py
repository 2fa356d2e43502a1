"""Plain DFlash adds no fields, no tensors and nothing of its own to the backbone. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

from ops.lib.drafts.layout import Layout, masks_first

if TYPE_CHECKING:
    from ops.lib.drafts.backbone.config import DraftConfig

ARCHITECTURE = "DFlashDraftModel"


@frozen
class Dflash:
    """The config of the algorithm DFlash, which has no fields of its own."""

    name: ClassVar[str] = "dflash"
    architecture: ClassVar[str] = ARCHITECTURE
    engine: ClassVar[str] = "DFLASH"
    speculators_type: ClassVar[str] = "dflash"
    speculators_architecture: ClassVar[str] = "DFlashSpeculator"
    source: ClassVar[str] = "https://arxiv.org/abs/2602.06036"

    def layout(self, block_size: int) -> Layout:
        return masks_first(block_size)

    def metrics(self, with_teacher: bool) -> tuple[str, ...]:
        return ()

    def mistakes(self, draft: DraftConfig) -> list[str]:
        return []

    def to_serving(self, serving: dict[str, Any]) -> dict[str, Any]:
        return serving

    @classmethod
    def from_serving(cls, data: Mapping[str, Any]) -> tuple[Dflash, dict[str, Any]]:
        return cls(), dict(data)

    def to_speculators(self) -> dict[str, Any]:
        return {}

    def slot_flops(self, draft: DraftConfig) -> float:
        return 0.0


MISSING: Mapping[str, str] = {}
WRONG: Mapping[str, str] = {}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that the algorithm adds to the backbone, by name. config: a config.json."""
    return {}
