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

from collections.abc import Iterator
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.block_context import BlockContext
from ops.lib.drafts.lilicorr.config import CPU_NODES, CUDA_NODES, LilicorrOptions, sizes
from ops.lib.drafts.lilicorr.model import Correlator, correlator_of
from ops.lib.drafts.losses.candidates import token_logits
from ops.lib.drafts.losses.head import head_cross_entropy_and_best
from ops.lib.drafts.losses.kinds import needs_teacher
from ops.lib.drafts.losses.loss import Loss, added_weights, combine, slot_losses
from ops.lib.drafts.losses.loss_request import Asked, Outcome
from ops.lib.target.embedding_and_head import AnyHead, of_teacher


def block_losses(draft: DraftModel, asked: Asked, head: AnyHead, loss: Loss) -> Outcome:
    """The losses of some slots of whole blocks, differentiable in the hidden states, the context and the lattice."""
    assert isinstance(loss.own, LilicorrOptions) and asked.context is not None
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
    is_true_NSC = candidates_NSC == asked.tokens_NK[:, 1:, None]
    is_offered_NS = is_true_NSC.any(dim=-1) & has_slot_NS
    reaches_NS = is_offered_NS.long().cumprod(dim=1).bool()
    counts_NS = reaches_NS & (asked.weights_NK[:, 1:] > 0).all(dim=1, keepdim=True)
    lost_NSC = None
    if loss.own.regret:
        assert asked.teacher_WM is not None
        with torch.no_grad():
            taught_NSC = _by_block(asked, token_logits(asked.teacher_WM, of_teacher(head), candidates_WC))
            place_NS1 = is_true_NSC.long().argmax(dim=-1, keepdim=True)
            lost_NSC = (taught_NSC.gather(2, place_NS1) - taught_NSC).clamp(min=0)
    blocks = Blocks(
        candidates_NSC=candidates_NSC,
        is_true_NSC=is_true_NSC,
        has_slot_NS=has_slot_NS,
        weights_NS=_by_block(asked, added_weights(loss, base_W, asked.weights_NK, asked.rows_W)) * counts_NS,
        lost_NSC=lost_NSC,
        embed_VM=asked.context.embed_VM,
        is_there_N=asked.context.is_there_N,
        correlator=correlator_of(draft),
        options=loss.own,
    )
    inputs = (_by_block(asked, log_p_WC), _by_block(asked, hidden_WM), asked.context.last_NM)
    added, terms_NS, takes_true_NS = _Sum.apply(
        blocks, torch.is_grad_enabled(), *inputs, *blocks.correlator.parameters()
    )
    found_NS = (torch.where(counts_NS, terms_NS, 0.0), reaches_NS & takes_true_NS, is_offered_NS, reaches_NS)
    added_W, is_right_W, *recalls = (_by_slot(asked, each_NS) for each_NS in found_NS)
    total = combine(loss, base_W, asked.weights_NK, asked.rows_W) + added
    return Outcome(base_W, is_right_W, added_W, tuple(recall_W.to(torch.float64) for recall_W in recalls), total)


@frozen(eq=False, kw_only=True)
class Blocks:
    """Some blocks' lattices without what takes a gradient.

    weights_NS, float64: how much each slot's terms count. lost_NSC: the target's logit of the true token less that of
    each candidate, at least 0; None without regret. Others as in `BlockContext` and `Correlator.after`.
    """

    candidates_NSC: Tensor
    is_true_NSC: Tensor
    has_slot_NS: Tensor
    weights_NS: Tensor
    lost_NSC: Tensor | None
    embed_VM: Tensor
    is_there_N: Tensor
    correlator: Correlator
    options: LilicorrOptions

    def parts(self) -> Iterator[slice]:
        """Slices of blocks for one pass each."""
        N, S, C = self.candidates_NSC.shape
        size = max(1, (CUDA_NODES if self.candidates_NSC.is_cuda else CPU_NODES) // (S * C))
        return (slice(start, start + size) for start in range(0, N, size))

    def terms(self, part: slice, log_p_NSC: Tensor, hidden_NSM: Tensor, last_NM: Tensor) -> tuple[Tensor, Tensor]:
        """The terms of each slot of some blocks, and whether the walk takes the true token after the true one before;
        both [n, S]. They mean nothing where the true token is no candidate. Other arguments: of these blocks.
        """
        options, is_true_NSC = self.options, self.is_true_NSC[part]
        place_NS = is_true_NSC.long().argmax(dim=-1)
        context = BlockContext(self.embed_VM, last_NM, self.is_there_N[part])
        lattice = (self.candidates_NSC[part], log_p_NSC, hidden_NSM, context, self.has_slot_NS[part])
        scores_NSC = self.correlator.after(place_NS, *lattice)
        terms_NS = _terms(scores_NSC, place_NS, is_true_NSC, options)
        if self.lost_NSC is not None:
            lost_NSC = self.lost_NSC[part].to(scores_NSC.dtype)
            terms_NS = terms_NS + options.regret * (scores_NSC.softmax(dim=-1) * lost_NSC).sum(dim=-1)
        return terms_NS, scores_NSC.argmax(dim=-1) == place_NS


class _Sum(torch.autograd.Function):
    """The weighted sum of all terms, float64 []; the terms and who takes the true token, both [N, S], without gradient.

    The gradients are made in the forward pass, of some blocks at a time, so that the lattices' activations never lie
    beside each other, or beside those of the backbone's backward pass. The correlator's parameters are given so that
    autograd knows them. It is called as a function, not as a module, whose hooks would take this for the step's
    backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        blocks: Blocks,
        with_gradient: bool,
        log_p_NSC: Tensor,
        hidden_NSM: Tensor,
        last_NM: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = (log_p_NSC, hidden_NSM, last_NM)
        gradients = [torch.empty_like(tensor) for tensor in inputs] if with_gradient else []
        # In float32 at least, as every part adds to them.
        sums = [
            torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32))
            for each in (parameters if with_gradient else ())
        ]
        total, found = blocks.weights_NS.new_zeros(()), []
        for part in blocks.parts():
            leaves = [tensor[part].detach().requires_grad_(with_gradient) for tensor in inputs]
            with torch.set_grad_enabled(with_gradient):
                terms_NS, takes_true_NS = blocks.terms(part, *leaves)
                # Where the true token is no candidate, terms may be infinite.
                weights_NS = blocks.weights_NS[part]
                sum_of_part = (weights_NS * torch.where(weights_NS > 0, terms_NS, 0.0)).sum()
            if with_gradient:
                of_inputs_and_parameters = torch.autograd.grad(sum_of_part, [*leaves, *parameters])
                for gradient, of_part in zip(gradients, of_inputs_and_parameters, strict=False):
                    gradient[part] = of_part
                for sum_, of_part in zip(sums, of_inputs_and_parameters[len(leaves) :], strict=True):
                    sum_ += of_part
            total += sum_of_part.detach()
            found.append((terms_NS.detach(), takes_true_NS))
        ctx.save_for_backward(*gradients, *sums)
        ctx.dtypes = [each.dtype for each in (*inputs, *parameters)]
        terms_NS, takes_true_NS = (torch.cat(each) for each in zip(*found, strict=True))
        ctx.mark_non_differentiable(terms_NS, takes_true_NS)
        return total, terms_NS, takes_true_NS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_others: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (
            (gradient * grad.to(gradient.dtype)).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return None, None, *gradients


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
