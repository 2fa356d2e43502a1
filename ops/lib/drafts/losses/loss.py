"""The losses: that of every slot, by the name of its kind, how they become one number, and its denominator.

head.py and comparison.py go through the vocabulary.

Legend: W weighted slots, N blocks, K block size, M hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from dsl.errors import DataError
from ops.lib.drafts.losses.comparison import Comparison, compare
from ops.lib.drafts.losses.head import Bias, head_cross_entropy, head_kl
from ops.lib.drafts.losses.kinds import LossKind, Terms, needs_divergence, needs_teacher
from ops.lib.target.embedding_and_head import AnyHead

LK_ETA = 3.0  # arXiv 2602.23881: how fast the divergence gives way as the overlap grows


@frozen(kw_only=True)
class Loss:
    """The loss with which a draft is trained.

    dflash: cross-entropy with the slots' weights (arXiv 2602.06036, section 4.2). focal: that times (1 -
    p)^focal_gamma, p the label's probability (arXiv 1708.02002, equation 4). dpace: weights from the draft's own
    confidence, smoothed by dpace_alpha (arXiv 2605.18810, equations 7 to 9).
    The others are weighted distances from the target's distribution: kl is the divergence (DistillSpec, arXiv
    2310.08461), l1 the sum of absolute differences, lk and nla the two LK losses (arXiv 2602.23881). own: further terms
    of the draft's algorithm.
    """

    kind: LossKind = "dflash"
    focal_gamma: float = 2.0
    dpace_alpha: float = 0.5
    own: Terms | None = None

    @property
    def base(self) -> float:
        return 1.0 if self.own is None else self.own.base

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss needs the target's distribution, computed from its final hidden states."""
        return needs_teacher(self.kind, self.own)


@frozen(eq=False)
class SlotLosses:
    """The losses of weighted slots.

    values_W: differentiable. correct_W: whether the best token is the label, bool. overlap_W: the probability that a
    sampled token is accepted, sum over tokens of min(draft, target); without gradient, only on request.
    """

    values_W: Tensor
    correct_W: Tensor
    overlap_W: Tensor | None = None


def slot_losses(
    kind: LossKind,
    hidden_WM: Tensor,
    head: AnyHead,
    labels_W: Tensor,
    teacher_WM: Tensor | None = None,
    bias: Bias | None = None,
    *,
    with_overlap: bool = False,
    alike_W: Tensor | None = None,
    checked: bool = False,
) -> SlotLosses:
    """The losses of slots before weighting; differentiable in hidden_WM and in the bias's latents and table.

    kl, l1, lk and nla need teacher_WM, the target's final hidden states. dflash, dpace and focal are the cross-entropy,
    and need it only for the overlap. alike_W is as in `compare`; dtypes, checked and IndexError are as in
    `head_cross_entropy`. Raises DataError if a needed teacher is missing.
    """
    if teacher_WM is None and (with_overlap or needs_teacher(kind)):
        raise DataError(f'the loss "{kind}" needs the target\'s final hidden states')
    if bias is None and not with_overlap:
        if kind == "kl":
            return SlotLosses(*head_kl(hidden_WM, teacher_WM, head, labels_W, checked=checked))
        if not needs_teacher(kind):
            return SlotLosses(*head_cross_entropy(hidden_WM, head, labels_W, checked=checked))
    found = compare(
        hidden_WM,
        head,
        labels_W,
        teacher_WM if with_overlap or needs_teacher(kind) else None,
        bias,
        divergence=needs_divergence(kind),
        distances=with_overlap or kind != "kl",
        alike_W=alike_W,
        checked=checked,
    )
    overlap_W = None
    if with_overlap and found.overlap_W is not None:
        overlap_W = found.overlap_W.detach().clamp(max=1)
    return SlotLosses(value_of(kind, found), found.correct_W, overlap_W)


def value_of(kind: LossKind, found: Comparison) -> Tensor:
    """The loss of each slot by its kind, from a comparison."""
    if not needs_teacher(kind):
        return found.ce_W
    if kind == "kl":
        assert found.kl_W is not None
        return found.kl_W
    assert found.l1_W is not None and found.overlap_W is not None
    if kind == "l1":
        return found.l1_W
    if kind == "nla":
        return -found.overlap_W.clamp_min(torch.finfo(found.overlap_W.dtype).tiny).log()
    assert found.kl_W is not None
    blend_W = torch.exp(-LK_ETA * found.overlap_W.detach())
    return blend_W * found.kl_W + (1 - blend_W) * found.l1_W / 2


def combine(loss: Loss, values_W: Tensor, weights_NK: Tensor, rows_W: Tensor, added_W: Tensor | None = None) -> Tensor:
    """The weighted sum of the slots' losses, float64 []: differentiable in values_W, to be divided by `denominator`.

    values_W: from `slot_losses`. rows_W: int64, the slot of each as n * K + k, without repetition. weights_NK: the
    slots' weights, 0 outside the mask and for slot 0. added_W: an algorithm's own loss of each slot, with the same
    weights but without the focal factor.
    focal: sum(w (1 - p)^gamma CE), p = exp(-CE), with gradient through both factors. dpace: sum(c CE) with c of
    `dpace_weights`. All others: sum(w value).
    """
    values_W = values_W.to(torch.float64)
    weights_W = added_weights(loss, values_W, weights_NK, rows_W)
    added = 0.0 if added_W is None else (weights_W * added_W.to(torch.float64)).sum()
    if loss.kind == "focal":
        # at CE = 0 the power has no finite slope for gammas below 1; the product's own limit there is 0
        wrong_W = -torch.expm1(-values_W)
        weights_W = weights_W * wrong_W.clamp_min(torch.finfo(torch.float64).tiny) ** loss.focal_gamma
    return loss.base * (weights_W * values_W).sum() + added


def added_weights(loss: Loss, values_W: Tensor, weights_NK: Tensor, rows_W: Tensor) -> Tensor:
    """The weight of an algorithm's own loss of each slot, float64 [W], without gradient; arguments as in `combine`."""
    if loss.kind == "dpace":
        return dpace_weights(values_W.detach(), weights_NK, rows_W, loss.dpace_alpha)
    return _weights_of(weights_NK, rows_W)


def weighted_sum(values_W: Tensor, weights_NK: Tensor, rows_W: Tensor) -> Tensor:
    """The weighted sum of the values, sum(w value), float64 []."""
    return (_weights_of(weights_NK, rows_W) * values_W.to(torch.float64)).sum()


def _weights_of(weights_NK: Tensor, rows_W: Tensor) -> Tensor:
    return weights_NK.flatten().index_select(0, rows_W).to(torch.float64)


def denominator(loss: Loss, weights_NK: Tensor) -> float:
    """The divisor of the summed loss: sum(w); for dpace the number of blocks with a weighted slot."""
    if loss.kind == "dpace":
        return float((weights_NK > 0).any(dim=1).sum())
    return float(weights_NK.sum(dtype=torch.float64))


def dpace_weights(ce_W: Tensor, weights_NK: Tensor, rows_W: Tensor, alpha: float) -> Tensor:
    """D-PACE's weight of each weighted slot, float64 [W]: the part of the expected accepted length that depends on it.

    With q = exp(-CE) and q~ = (1 - alpha) q + alpha: c_j = sum over m >= j of prod over i <= m of q~_i. The slots are
    1.. of a block, up to the first one without weight; later slots and slot 0 get 0.
    """
    smoothed_W = (1 - alpha) * torch.exp(-ce_W.to(torch.float64)) + alpha
    q_NK = torch.zeros(weights_NK.shape, dtype=torch.float64, device=weights_NK.device)
    q_NK.view(-1).index_copy_(0, rows_W, smoothed_W)
    q_NK = torch.where(weights_NK > 0, q_NK, 0.0)
    reach_NK = torch.zeros_like(q_NK)
    reach_NK[:, 1:] = q_NK[:, 1:].cumprod(dim=1)
    weights_NK = torch.where(weights_NK > 0, reach_NK.flip(1).cumsum(dim=1).flip(1), 0.0)
    return weights_NK.flatten().index_select(0, rows_W)
