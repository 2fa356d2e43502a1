"""Plain DFlash adds nothing to the backbone, and chooses every token of a block by itself."""

from __future__ import annotations

from torch import Tensor

from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.hooks import Around, Drawn
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.proposal import Proposal
from ops.lib.drafts.decoding.sampling import Choice


def around_sublayers(config: DraftConfig) -> dict[str, Around]:
    return {}


def heads(config: DraftConfig) -> dict[str, Drawn]:
    return {}


def propose(draft: DraftModel, hidden_BDM: Tensor, logits_BDV: Tensor, anchors_B: Tensor, choice: Choice) -> Proposal:
    """The proposed tokens after each anchor, by the logits alone. logits_BDV: of the hidden states, by the target's
    head.
    """
    return Proposal(choice.propose(logits_BDV))
