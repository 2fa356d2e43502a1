"""base * loss, of the plain logits, + the terms of the lattice: cross-entropy, hinge and regret, teacher forced.

The scores s of slot k's candidates are those after the *true* token k - 1. The terms of a slot are

    cross_entropy * -log softmax(s)[true token]
    hinge         * relu(margin - gap), gap = s[true token] - the best other score
    regret        * sum over candidates c of softmax(s)[c] * relu(t[true token] - t[c]), t the target's logits

They count only in blocks that lie in the mask as a whole, and there only up to the first slot whose list lacks the true
token: behind it there is no such predecessor. The gradient goes through the candidates' log-probabilities and states
into the backbone, not through the choice of candidates. Where a block ends at the mask, its lattice is that of a
shorter block.

ModelOpt takes these terms' mean over the slots that count; here they have the weights and the denominator of `loss`,
as every algorithm's terms. Its weights are 0.25, 0, 0.25, or 0.125, 0.125, 0.25 with margin 2.

A token counts as correct where the walk would take it behind the true ones, if all of these are candidates.
candidate_recall: whether the token is in its slot's list; prefix_recall: whether those before are in theirs, too, which
is the ceiling of the walk. Source: ModelOpt's pull request 2342.

W slots, N blocks, K tokens of a block with the anchor's, S = K - 1, C candidates
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.lilicorr.config import LilicorrOptions, sizes
from ops.lib.drafts.lilicorr.model import correlator_of
from ops.lib.drafts.losses.candidates import token_logits
from ops.lib.drafts.losses.head import head_cross_entropy_and_best
from ops.lib.drafts.losses.kinds import needs_teacher
from ops.lib.drafts.losses.loss import Loss, slot_losses
from ops.lib.drafts.losses.loss_request import Asked, Outcome
from ops.lib.target.embedding_and_head import AnyHead, of_teacher


def block_losses(draft: DraftModel, asked: Asked, head: AnyHead, loss: Loss) -> Outcome:
    """The losses of some slots of whole blocks, differentiable in the hidden states, the context and the lattice."""
    options, context = loss.own, asked.context
    assert isinstance(options, LilicorrOptions) and context is not None
    hidden_WM, labels_W = asked.hidden_WM, asked.labels_W
    count = sizes(draft.config).candidates
    ce_W, _, candidates_WC = head_cross_entropy_and_best(hidden_WM, head, labels_W, count, checked=True)
    base_W = ce_W
    if needs_teacher(loss.kind):
        given = (hidden_WM, head, labels_W, asked.teacher_WM)
        base_W = slot_losses(loss.kind, *given, alike_W=asked.alike_W, checked=True).values_W
    logits_WC1 = token_logits(hidden_WM, head, torch.cat((candidates_WC, labels_W[:, None]), dim=1))
    total_W1 = (ce_W + logits_WC1[:, -1])[:, None]  # log sum exp over the vocabulary, with its gradient
    log_p_WC = logits_WC1[:, :-1] - total_W1

    has_slot_NS = _by_block(asked, torch.ones_like(labels_W, dtype=torch.bool))
    candidates_NSC = _by_block(asked, candidates_WC)
    log_p_NSC, hidden_NSM = _by_block(asked, log_p_WC), _by_block(asked, hidden_WM)
    first_NC, pairs_NSCC = correlator_of(draft)(candidates_NSC, log_p_NSC, hidden_NSM, context, has_slot_NS)

    is_true_NSC = candidates_NSC == asked.tokens_NK[:, 1:, None]
    place_NS = is_true_NSC.long().argmax(dim=-1)
    is_offered_NS = is_true_NSC.any(dim=-1) & has_slot_NS
    reaches_NS = is_offered_NS.long().cumprod(dim=1).bool()
    before_NS11 = place_NS[:, :-1, None, None].expand(-1, -1, 1, count)
    after_NSC = torch.cat((first_NC[:, None], pairs_NSCC.gather(2, before_NS11)[:, :, 0]), dim=1)
    counts_NS = reaches_NS & (asked.weights_NK[:, 1:] > 0).all(dim=1, keepdim=True)
    terms_NS = _terms(after_NSC, place_NS, is_true_NSC, options)
    if options.regret:
        assert asked.teacher_WM is not None
        with torch.no_grad():
            taught_NSC = _by_block(asked, token_logits(asked.teacher_WM, of_teacher(head), candidates_WC))
            lost_NSC = (taught_NSC.gather(2, place_NS[..., None]) - taught_NSC).clamp(min=0)
        terms_NS = terms_NS + options.regret * (after_NSC.softmax(dim=-1) * lost_NSC.to(after_NSC.dtype)).sum(dim=-1)
    added_W = _by_slot(asked, torch.where(counts_NS, terms_NS, 0.0))
    is_right_W = _by_slot(asked, reaches_NS & (after_NSC.argmax(dim=-1) == place_NS))
    recalls = (_by_slot(asked, found_NS.to(torch.float64)) for found_NS in (is_offered_NS, reaches_NS))
    return Outcome(base_W, is_right_W, added_W, tuple(recalls))


def _terms(after_NSC: Tensor, place_NS: Tensor, is_true_NSC: Tensor, options: LilicorrOptions) -> Tensor:
    """Cross-entropy and hinge of each slot, [N, S]; they mean nothing where the true token is no candidate."""
    of_true_NS = after_NSC.gather(2, place_NS[..., None])[..., 0]
    terms_NS = options.cross_entropy * (after_NSC.logsumexp(dim=-1) - of_true_NS)
    if options.hinge and after_NSC.shape[-1] > 1:  # a single candidate has no other beside it
        other_NS = after_NSC.masked_fill(is_true_NSC, float("-inf")).amax(dim=-1)
        terms_NS = terms_NS + options.hinge * (options.margin - of_true_NS + other_NS).clamp(min=0)
    return terms_NS


def _by_block(asked: Asked, values: Tensor) -> Tensor:
    """Values of slots by block, [N, S, ...] from [W, ...]; zero for slots that were not asked for."""
    N, K = asked.tokens_NK.shape
    flat = values.new_zeros(N * K, *values.shape[1:])
    return flat.index_copy(0, asked.rows_W, values).unflatten(0, (N, K))[:, 1:]


def _by_slot(asked: Asked, values_NS: Tensor) -> Tensor:
    """Values of the slots that were asked for, [W]; zero for an anchor's."""
    padded_NK = torch.cat((torch.zeros_like(values_NS[:, :1]), values_NS), dim=1)
    return padded_NK.flatten().index_select(0, asked.rows_W)
