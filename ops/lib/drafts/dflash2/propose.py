"""The walk: from the anchor left to right, at each slot the best of its candidates behind the token chosen before.

B rows, D proposals, M hidden size, V vocabulary, C candidates, R rank
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.proposal import Proposal
from ops.lib.drafts.decoding.sampling import Choice
from ops.lib.drafts.dflash2.config import sizes
from ops.lib.drafts.dflash2.modules import selector_of


def propose(draft: DraftModel, hidden_BDM: Tensor, logits_BDV: Tensor, anchors_B: Tensor, choice: Choice) -> Proposal:
    """As dflash/propose.py. Only candidates have a probability, when tokens are drawn.

    The selector's term is computed in the draft's dtype, and added to the logits in float32 at least, as SGLang does.
    """
    best = logits_BDV.topk(sizes(draft.config).candidates, dim=-1)
    logits_BDC = best.values.to(torch.promote_types(best.values.dtype, torch.float32))
    selector = selector_of(draft)
    projected_BDR = selector.hidden_projection(hidden_BDM)
    tokens = [anchors_B]
    for place in range(hidden_BDM.shape[1]):
        candidates_BC = best.indices[:, place]
        scores_BC = logits_BDC[:, place] + selector.follow(projected_BDR[:, place], tokens[-1], candidates_BC)
        tokens.append(choice.among(scores_BC, candidates_BC, logits_BDV.shape[-1], place))
    return Proposal(torch.stack(tokens[1:], dim=1))
