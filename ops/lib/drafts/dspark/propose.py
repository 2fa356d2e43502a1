"""From the anchor left to right, each token by its logits and the bias of the token before.

B rows, D proposals, M hidden size, V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.proposal import Proposal
from ops.lib.drafts.decoding.sampling import Choice
from ops.lib.drafts.dspark.modules import confidence_head, markov_head


def propose(draft: DraftModel, hidden_BDM: Tensor, logits_BDV: Tensor, anchors_B: Tensor, choice: Choice) -> Proposal:
    """As dflash/propose.py."""
    head = markov_head(draft)
    table_VR = head.markov_w2.weight.to(logits_BDV.dtype)
    tokens = [anchors_B]
    for place in range(hidden_BDM.shape[1]):
        bias_BV = head.latent(tokens[-1], logits_BDV.dtype) @ table_VR.T
        tokens.append(choice.next(logits_BDV[:, place] + bias_BV, place))
    confidence, confidence_BD = confidence_head(draft), None
    if confidence is not None:
        before_BD = torch.stack(tokens[:-1], dim=1)
        confidence_BD = confidence(hidden_BDM, head.latent(before_BD, hidden_BDM.dtype)).float().sigmoid()
    return Proposal(torch.stack(tokens[1:], dim=1), confidence_BD)
