"""base * loss, of the plain logits, + selector * cross-entropy over the candidates, teacher forced.

The score of a candidate c of slot k is its logit plus what the selector says of c behind the *true* token k - 1. The
true token replaces the last candidate where it is none. A training objective is not published; this is that of
speculators and NeMo AutoModel, which agree but for slots whose token is no candidate. A token counts as correct where
the walk would take it behind the true ones, as it does when it reaches it; candidate_recall is the ceiling of that.

W slots, C candidates, R rank
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.dflash2.config import sizes
from ops.lib.drafts.dflash2.modules import selector_of
from ops.lib.drafts.dflash2.options import Dflash2Options
from ops.lib.drafts.losses.asked import Asked, Outcome
from ops.lib.drafts.losses.candidates import best_tokens, token_logits
from ops.lib.drafts.losses.loss import Loss, slot_losses


def block_losses(draft: DraftModel, asked: Asked, head_VM: Tensor, loss: Loss) -> Outcome:
    """The losses of some slots of whole blocks, differentiable in the hidden states and the selector."""
    options = loss.own
    assert isinstance(options, Dflash2Options)
    hidden_WM, labels_W = asked.hidden_WM, asked.labels_W
    base_W = slot_losses(loss.kind, hidden_WM, head_VM, labels_W, asked.teacher_WM, checked=True).values_W
    selector = selector_of(draft)
    _, candidates_WC = best_tokens(hidden_WM, head_VM, sizes(draft.config).candidates)
    is_candidate_W = (candidates_WC == labels_W[:, None]).any(dim=1)
    last_W = torch.where(is_candidate_W, candidates_WC[:, -1], labels_W)
    offered_WC = torch.cat((candidates_WC[:, :-1], last_W[:, None]), dim=1)
    logits_WC = token_logits(hidden_WM, head_VM, offered_WC)
    projected_WR = selector.hidden_projection(hidden_WM).to(logits_WC.dtype)
    scores_WC = logits_WC + selector.follow(projected_WR, asked.before_W, offered_WC)
    true_W = (offered_WC == labels_W[:, None]).to(torch.int8).argmax(dim=1)
    added_W = options.selector * (scores_WC.logsumexp(dim=1) - scores_WC.gather(1, true_W[:, None])[:, 0])
    correct_W = is_candidate_W & (scores_WC.argmax(dim=1) == true_W)
    return Outcome(base_W, correct_W, added_W, (is_candidate_W.to(torch.float64),))
