"""The bias [V, D], V the vocabulary, D the proposals of a block: zero at the start, which is plain DFlash.

Every token is proposed by itself, by its logits and its slot's bias.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.hooks import Around, Drawn
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.proposal import Proposal
from ops.lib.drafts.decoding.sampling import Choice
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


def propose(draft: DraftModel, hidden_BDM: Tensor, logits_BDV: Tensor, anchors_B: Tensor, choice: Choice) -> Proposal:
    """The proposed tokens after each anchor. logits_BDV: of the hidden states, by the target's head."""
    bias_DV = scale_of(draft.config) * table_of(draft).T[: logits_BDV.shape[1]].to(logits_BDV.dtype)
    return Proposal(choice.propose(logits_BDV + bias_DV))
