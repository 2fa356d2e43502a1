"""The sizes of DFlash2, and their form in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

from ops.lib.drafts.layout import Layout, masks_first

if TYPE_CHECKING:
    from ops.lib.drafts.backbone.config import DraftConfig

SERVED = {
    "taps": "conv_kernel_size",
    "group": "conv_group_size",
    "rank": "selector_rank",
    "candidates": "selector_top_k",
}
NEST = "dflash_config"
# Triton's arange, by which SGLang's kernel goes through the candidates, takes no other sizes.
POWER_OF_2 = "must be a power of two, or SGLang's walk on CUDA cannot start"


@frozen(kw_only=True)
class Dflash2:
    """taps: slots that a convolution reads, the own one among them. group: neighbouring dimensions that share a kernel
    made of the slot. rank: of the selector's tables. candidates: tokens of each slot that the selector chooses among.
    """

    taps: int = 2
    group: int = 16
    rank: int = 256
    candidates: int = 16

    name: ClassVar[str] = "dflash2"
    architecture: ClassVar[str] = "DFlash2DraftModel"
    engine: ClassVar[str] = "DFLASH"
    speculators_type: ClassVar[str] = "dflash2"
    speculators_architecture: ClassVar[str] = "DFlash2DraftModel"
    source: ClassVar[str] = "https://github.com/z-lab/dflash"

    def layout(self, block_size: int) -> Layout:
        return masks_first(block_size)

    def metrics(self, with_teacher: bool) -> tuple[str, ...]:
        return ("candidate_recall",)

    def mistakes(self, draft: DraftConfig) -> list[str]:
        mistakes = [
            f"{field_name(name)}: must be at least 1, got {getattr(self, name)}"
            for name in SERVED
            if getattr(self, name) < 1
        ]
        if mistakes:
            return mistakes
        if draft.hidden_size % self.group:
            mistakes.append(f"{field_name('group')}: {self.group} does not divide hidden_size = {draft.hidden_size}")
        if self.taps > draft.block_size:
            mistakes.append(f"{field_name('taps')}: {self.taps} slots of a block of {draft.block_size}")
        if self.candidates & (self.candidates - 1):
            mistakes.append(f"{field_name('candidates')}: {POWER_OF_2}, got {self.candidates}")
        if self.candidates > draft.vocab_size:
            mistakes.append(f"{field_name('candidates')}: {self.candidates} of a vocabulary of {draft.vocab_size}")
        return mistakes

    def to_serving(self, serving: dict[str, Any]) -> dict[str, Any]:
        return serving | {NEST: serving[NEST] | self.to_speculators()}

    @classmethod
    def from_serving(cls, data: Mapping[str, Any]) -> tuple[Dflash2, dict[str, Any]]:
        nest = dict(data[NEST])
        own = {name: nest.pop(served) for name, served in SERVED.items()}
        return cls(**own), {**data, NEST: nest}

    def to_speculators(self) -> dict[str, Any]:
        return {served: getattr(self, name) for name, served in SERVED.items()}

    def parameters(self, draft: DraftConfig) -> int:
        M = draft.hidden_size
        convolution = 2 * self.taps * M + 2 * self.taps * (M // self.group) * M
        return 2 * draft.num_hidden_layers * convolution + 2 * draft.vocab_size * self.rank + self.rank * M

    def slot_floats(self, draft: DraftConfig) -> int:
        M = draft.hidden_size
        convolution = 2 * self.taps * (M // self.group) + (2 * self.taps + 2) * M
        return 2 * draft.num_hidden_layers * convolution + self.rank * (self.candidates + 4) + 5 * self.candidates

    def slot_flops(self, draft: DraftConfig) -> float:
        M, scored = draft.hidden_size, self.candidates + 1  # with the label
        convolution = 2 * self.taps * (M // self.group) * M
        selector = self.rank * (M + scored)
        # the candidates are found in the logits of the loss; those that are scored are made again, with a gradient
        return 3 * 2 * (2 * draft.num_hidden_layers * convolution + selector) + 2 * 2 * scored * M


def field_name(name: str) -> str:
    """A field by its names in a pipeline and in config.json."""
    return f"dflash2.{name} ({SERVED[name]})"


def sizes(draft: DraftConfig) -> Dflash2:
    """The algorithm of a DFlash2 draft."""
    assert isinstance(draft.algorithm, Dflash2)
    return draft.algorithm
