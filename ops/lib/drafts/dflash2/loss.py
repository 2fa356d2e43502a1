"""The base loss of plain DFlash, and cross-entropy of the selector over the candidates, teacher forced.

The score of a candidate c of slot k is its logit plus what the selector says of c behind the *true* token k - 1. The
true token replaces the last candidate where it is none. Its cross-entropy has the weights of the base loss. A training
objective is not published; this is that of speculators and NeMo AutoModel, which agree but for slots whose
token is no candidate. Accuracy is that of the walk, whose tokens are proposed; candidate_recall its ceiling.

W slots, N blocks, K tokens of a block, C candidates, R rank
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.dflash2.config import sizes
from ops.lib.drafts.dflash2.modules import Selector, selector_of
from ops.lib.drafts.losses.asked import Asked, Outcome
from ops.lib.drafts.losses.candidates import best_tokens, token_logits
from ops.lib.drafts.losses.loss import Loss, slot_losses


def block_losses(draft: DraftModel, asked: Asked, head_VM: Tensor, loss: Loss) -> Outcome:
    """The losses of some slots of whole blocks, differentiable in the hidden states and the selector."""
    hidden_WM, labels_W = asked.hidden_WM, asked.labels_W
    base_W = slot_losses(loss.kind, hidden_WM, head_VM, labels_W, asked.teacher_WM, checked=True).values_W
    selector = selector_of(draft)
    best_WC, candidates_WC = best_tokens(hidden_WM, head_VM, sizes(draft.config).candidates)
    is_candidate_W = (candidates_WC == labels_W[:, None]).any(dim=1)
    last_W = torch.where(is_candidate_W, candidates_WC[:, -1], labels_W)
    offered_WC = torch.cat((candidates_WC[:, :-1], last_W[:, None]), dim=1)
    logits_WC = token_logits(hidden_WM, head_VM, offered_WC)
    projected_WR = selector.hidden_projection(hidden_WM).to(logits_WC.dtype)
    scores_WC = logits_WC + selector.follow(projected_WR, asked.before_W, offered_WC)
    true_W = (offered_WC == labels_W[:, None]).to(torch.int8).argmax(dim=1)
    chosen_W = scores_WC.logsumexp(dim=1) - scores_WC.gather(1, true_W[:, None])[:, 0]
    correct_W = _walk(selector, asked, best_WC, candidates_WC, projected_WR.detach()) == labels_W
    return Outcome(base_W, correct_W, chosen_W, (is_candidate_W.to(torch.float64),))


@torch.no_grad()
def _walk(selector: Selector, asked: Asked, best_WC: Tensor, candidates_WC: Tensor, projected_WR: Tensor) -> Tensor:
    """The token of each slot when the walk chooses those before it, int64 [W]."""
    N, K = asked.tokens_NK.shape
    tokens_NK = asked.tokens_NK.clone()
    block_W, place_W = asked.rows_W // K, asked.rows_W % K
    grid = torch.zeros(N, K, dtype=torch.int64, device=block_W.device)
    grid[block_W, place_W] = torch.arange(len(block_W), device=block_W.device)
    for place in range(1, K):
        row_N = grid[:, place]
        scores_NC = best_WC[row_N] + selector.follow(projected_WR[row_N], tokens_NK[:, place - 1], candidates_WC[row_N])
        tokens_NK[:, place] = candidates_WC[row_N].gather(1, scores_NC.argmax(dim=1, keepdim=True))[:, 0]
    return tokens_NK.flatten()[asked.rows_W]
