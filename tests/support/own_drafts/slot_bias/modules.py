"""The bias [V, D], V the vocabulary, D the proposals of a block: zero at the start, which is plain DFlash."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.hooks import Around, Drawn
from slot_bias.config import SlotBias


class Bias(Drawn):
    def __init__(self, vocabulary: int, proposals: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(vocabulary, proposals))

    def draw(self, generator: torch.Generator, std: float) -> None:
        self.table.zero_()


def around_sublayers(config: DraftConfig) -> dict[str, Around]:
    return {}


def heads(config: DraftConfig) -> dict[str, Drawn]:
    return {"slot_bias": Bias(config.vocab_size, config.block_size - 1)}


def table_of(draft: nn.Module) -> Tensor:
    bias = draft.slot_bias
    assert isinstance(bias, Bias)
    return bias.table


def scale_of(config: DraftConfig) -> float:
    assert isinstance(config.algorithm, SlotBias)
    return config.algorithm.scale
