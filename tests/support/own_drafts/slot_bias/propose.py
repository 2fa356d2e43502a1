"""Every token by itself, by its logits and its slot's bias."""

from __future__ import annotations

from torch import Tensor

from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.proposal import Proposal
from ops.lib.drafts.decoding.sampling import Choice
from slot_bias.modules import scale_of, table_of


def propose(draft: DraftModel, hidden_BDM: Tensor, logits_BDV: Tensor, anchors_B: Tensor, choice: Choice) -> Proposal:
    """The tokens behind each anchor; logits_BDV: of the hidden states, by the target's head."""
    bias_DV = scale_of(draft.config) * table_of(draft).T[: logits_BDV.shape[1]].to(logits_BDV.dtype)
    return Proposal(choice.propose(logits_BDV + bias_DV))
