"""base * loss, of the plain logits, + selector * cross-entropy over the candidates, teacher forced.

The score of a candidate c of slot k is its logit plus what the selector says of c behind the *true* token k - 1. The
authors' objective is not public; two others are, by `label` and `missing` of the options. "target" and "replace" are
that of speculators 0.9: the label is the target's most probable token, and where it is no candidate it replaces the
last one. "data" and "skip" are that of NeMo AutoModel: the label is the token of the data, and slots whose token is no
candidate add nothing; its mean leaves them out, the mean here does not. The defaults are "data" and "replace".

A token counts as correct where the walk would take it behind the true ones, as it does when it reaches it;
candidate_recall is the ceiling of that. Both are of the true token, whatever the label is.

W slots, C candidates, R rank
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.dflash2.config import Dflash2Options, sizes
from ops.lib.drafts.dflash2.model import selector_of
from ops.lib.drafts.losses.candidates import best_tokens, token_logits
from ops.lib.drafts.losses.head import head_cross_entropy_and_best
from ops.lib.drafts.losses.kinds import needs_teacher
from ops.lib.drafts.losses.loss import Loss, slot_losses
from ops.lib.drafts.losses.loss_request import Asked, Outcome


def block_losses(draft: DraftModel, asked: Asked, head_VM: Tensor, loss: Loss) -> Outcome:
    """The losses of some slots of whole blocks, differentiable in the hidden states and the selector."""
    options = loss.own
    assert isinstance(options, Dflash2Options)
    hidden_WM, labels_W = asked.hidden_WM, asked.labels_W
    base_W, candidates_WC = _base(asked, head_VM, loss, sizes(draft.config).candidates)
    selector = selector_of(draft)
    wanted_W = labels_W
    if options.label == "target":
        assert asked.teacher_WM is not None
        wanted_W = best_tokens(asked.teacher_WM, head_VM, 1)[1][:, 0]
    scored_WC1 = torch.cat((candidates_WC, wanted_W[:, None]), dim=1)
    logits_WC1 = token_logits(hidden_WM, head_VM, scored_WC1)
    projected_WR = selector.hidden_projection(hidden_WM).to(logits_WC1.dtype)
    scores_WC1 = logits_WC1 + selector.follow(projected_WR, asked.before_W, scored_WC1)
    scores_WC, of_wanted_W = scores_WC1[:, :-1], scores_WC1[:, -1]
    walked_W = candidates_WC.gather(1, scores_WC.argmax(dim=1, keepdim=True))[:, 0]
    is_offered_W = (candidates_WC == wanted_W[:, None]).any(dim=1)
    last_W = torch.where(is_offered_W, scores_WC[:, -1], of_wanted_W)
    offered_WC = torch.cat((scores_WC[:, :-1], last_W[:, None]), dim=1)
    chosen_W = offered_WC.logsumexp(dim=1) - of_wanted_W
    if options.missing == "skip":
        chosen_W = torch.where(is_offered_W, chosen_W, 0.0)
    recall_W = (candidates_WC == labels_W[:, None]).any(dim=1).to(torch.float64)
    return Outcome(base_W, walked_W == labels_W, options.selector * chosen_W, (recall_W,))


def _base(asked: Asked, head_VM: Tensor, loss: Loss, count: int) -> tuple[Tensor, Tensor]:
    """The base loss and the candidates; a cross-entropy finds the candidates while it has all logits."""
    if needs_teacher(loss.kind):
        given = (asked.hidden_WM, head_VM, asked.labels_W, asked.teacher_WM)
        found = slot_losses(loss.kind, *given, alike_W=asked.alike_W, checked=True)
        return found.values_W, best_tokens(asked.hidden_WM, head_VM, count)[1]
    base_W, _, candidates_WC = head_cross_entropy_and_best(
        asked.hidden_WM, head_VM, asked.labels_W, count, checked=True
    )
    return base_W, candidates_WC
