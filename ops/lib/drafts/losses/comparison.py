"""The draft's distribution beside the label and the target's, tile by tile: with a bias, and more than one distance.

The draft's logits are x = h W^T + z T^T: W the target's frozen head, T [V, r] a trained table, z the slot's latent
(DSpark, arXiv 2607.05147, calls T w2). Neither [W | T] nor the bias of all tokens is ever made: a tile of logits is two
products. The teacher's are y = t W^T. With q = softmax(x), p = softmax(y) and the label l:

    ce       -log q_l             slope in x_v:  q_v - [v = l]
    kl       sum p log(p / q)                    q_v - p_v
    l1       sum |q - p|                         2 q_v below where q_v > p_v,  -2 q_v above where q_v < p_v
    overlap  sum min(p, q) = 1 - l1 / 2          -1/2 of l1's

above and below are the draft's probability of all tokens with q > p, and with q < p. Where q_v = p_v, half of q_v
counts to each and the slope is the mean of both, as |.| has the slope 0 at 0: equal distributions have none. (As
q_v times sign(q_v - p_v) minus its mean over q, it would lose its digits where the distributions hardly overlap.)

What a table's gradient takes from a slot needs the slot's normalisers, so the forward pass keeps nothing but such
numbers per slot; the backward pass makes the tiles again, and one product per factor for all four. Products with M
columns: ce 3, kl 5, the distances 7; head.py's cross-entropy and divergence without a bias, whose gradients are made in
the forward pass, 2 and 4. In both softmaxes the label's logit is kept out of the sums, as in head.py: the cross-entropy
keeps its digits, and equal logits give equal bits.

Legend: W weighted slots, R rows of a tile, C its columns, M hidden size, V vocabulary, r width of the latents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.lib.drafts.losses.head import Bias, HeadSoftmax, TileLogits, Tiles, add_gap, add_product, check_labels
from ops.lib.drafts.losses.tiled_softmax import RowState
from ops.lib.kernels.compiled import compiled


@frozen(eq=False)
class Comparison:
    """Per slot [W], in float32 (float64 for float64 inputs): see above; None where it was not asked for.

    correct_W: whether the best token of the draft, with its bias, is the label, bool; of equal ones the first.
    """

    ce_W: Tensor
    kl_W: Tensor | None
    l1_W: Tensor | None
    overlap_W: Tensor | None
    correct_W: Tensor


def compare(
    hidden_WM: Tensor,
    head_VM: Tensor,
    labels_W: Tensor,
    teacher_WM: Tensor | None = None,
    bias: Bias | None = None,
    *,
    distances: bool = True,
    checked: bool = False,
) -> Comparison:
    """Cross-entropy, and with a teacher the divergence and (unless distances is False) l1 and overlap.

    All are differentiable with respect to hidden_WM and the bias's latents and table, together in one backward pass.
    dtypes of products, checked and IndexError as in `head_cross_entropy`. Memory: the gradients, of the table in
    float32 at least, three tiles of logits, and a tile's rows of sums [R, M].
    """
    if not checked:
        check_labels(labels_W, head_VM)
    latent_Wr, table_Vr = (None, None) if bias is None else (bias.latent_Wr, bias.table_Vr)
    return Comparison(
        *_Comparison.apply(
            hidden_WM, latent_Wr, table_Vr, teacher_WM, head_VM, labels_W, distances and teacher_WM is not None
        )
    )


# What the forward pass keeps of each slot. A probability is exp(logit - REFERENCE) * FACTOR; WRONG: 1 - q of the label,
# with all its digits; ABOVE and BELOW: see the module's text.
CE, KL, L1, OVERLAP, ABOVE, BELOW, WRONG, REFERENCE, FACTOR, TEACHER_REFERENCE, TEACHER_FACTOR = range(11)


class _Comparison(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_WM: Tensor,
        latent_Wr: Tensor | None,
        table_Vr: Tensor | None,
        teacher_WM: Tensor | None,
        head_VM: Tensor,
        labels_W: Tensor,
        distances: bool,
    ) -> tuple[Tensor | None, ...]:
        tiles = Tiles(hidden_WM, head_VM)
        slots = _Slots(hidden_WM, teacher_WM, labels_W, _bias(latent_Wr, table_Vr))
        kept_nW = hidden_WM.new_zeros(TEACHER_FACTOR + 1, len(hidden_WM), dtype=tiles.dtype)
        correct_W = torch.empty_like(labels_W, dtype=torch.bool)
        for rows in tiles.chunks(len(hidden_WM)):
            correct_W[rows] = _normalise(tiles, slots.of(rows), kept_nW[:, rows])
            if distances:
                _measure(tiles, slots.of(rows), kept_nW[:, rows])
        ctx.mark_non_differentiable(correct_W)
        ctx.set_materialize_grads(False)  # what nothing was made of costs nothing
        ctx.save_for_backward(hidden_WM, latent_Wr, table_Vr, teacher_WM, head_VM, labels_W, kept_nW)
        kl_W = None if teacher_WM is None else kept_nW[KL].clone()
        l1_W, overlap_W = (kept_nW[L1].clone(), kept_nW[OVERLAP].clone()) if distances else (None, None)
        return kept_nW[CE].clone(), kl_W, l1_W, overlap_W, correct_W

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        of_ce_W: Tensor | None,
        of_kl_W: Tensor | None,
        of_l1_W: Tensor | None,
        of_overlap_W: Tensor | None,
        _of_correct: None,
    ) -> tuple[Tensor | None, ...]:
        hidden_WM, latent_Wr, table_Vr, teacher_WM, head_VM, labels_W, kept_nW = ctx.saved_tensors
        tiles = Tiles(hidden_WM, head_VM)
        if of_overlap_W is not None:
            of_l1_W = of_overlap_W / -2 if of_l1_W is None else of_l1_W - of_overlap_W / 2
        upstream = _Upstream(of_ce_W, of_kl_W, of_l1_W)
        slots = _Slots(hidden_WM, teacher_WM if upstream.of_teacher else None, labels_W, _bias(latent_Wr, table_Vr))
        needed = [ctx.needs_input_grad[place] for place in range(3)]
        hidden_grad_WM = torch.empty_like(hidden_WM) if needed[0] else None
        latent_grad_Wr = torch.empty_like(latent_Wr) if needed[1] else None
        table_sum_Vr = torch.zeros_like(table_Vr, dtype=tiles.dtype) if needed[2] else None
        for rows in tiles.chunks(len(hidden_WM)):
            hidden_sum_RM, latent_sum_Rr = _slopes(
                tiles, slots.of(rows), kept_nW[:, rows], upstream.of(rows), needed, table_sum_Vr
            )
            if hidden_grad_WM is not None:
                hidden_grad_WM[rows] = hidden_sum_RM.to(hidden_WM.dtype)
            if latent_grad_Wr is not None:
                latent_grad_Wr[rows] = latent_sum_Rr.to(latent_Wr.dtype)
        table_grad_Vr = None if table_sum_Vr is None else table_sum_Vr.to(table_Vr.dtype)
        return hidden_grad_WM, latent_grad_Wr, table_grad_Vr, None, None, None, None


@frozen(eq=False)
class _Slots:
    hidden_WM: Tensor
    teacher_WM: Tensor | None
    labels_W: Tensor
    bias: Bias | None

    def of(self, rows: slice) -> _Slots:
        return _Slots(
            self.hidden_WM[rows],
            None if self.teacher_WM is None else self.teacher_WM[rows],
            self.labels_W[rows],
            None if self.bias is None else self.bias.of(rows),
        )


@frozen(eq=False)
class _Upstream:
    """The gradients of what is returned, that of the overlap as part of l1's; None where there is none."""

    ce_W: Tensor | None
    kl_W: Tensor | None
    l1_W: Tensor | None

    @property
    def of_teacher(self) -> bool:
        return self.kl_W is not None or self.l1_W is not None

    def of(self, rows: slice) -> list[Tensor | None]:
        return [None if values_W is None else values_W[rows].clone() for values_W in (self.ce_W, self.kl_W, self.l1_W)]


def _bias(latent_Wr: Tensor | None, table_Vr: Tensor | None) -> Bias | None:
    return None if latent_Wr is None or table_Vr is None else Bias(latent_Wr, table_Vr)


def _normalise(tiles: Tiles, slots: _Slots, kept_nR: Tensor) -> Tensor:
    """The first sweep: fills in the cross-entropy, the divergence and the normalisers; which rows are correct."""
    labels_R = slots.labels_W
    draft = HeadSoftmax(tiles, slots.hidden_WM, labels_R, hide=True, with_gradient=False, bias=slots.bias)
    teacher = None
    if slots.teacher_WM is not None:
        teacher = HeadSoftmax(tiles, slots.teacher_WM, labels_R, hide=True, with_gradient=False)
    gap_R = torch.zeros_like(draft.state.total_R)
    for start, head_CM in tiles:
        draft_RC = draft.logits(start, head_CM, 0)
        if teacher is not None:
            gap_R = add_gap(gap_R, draft_RC, teacher, teacher.logits(start, head_CM, 1), start, head_CM)
        draft.add(draft_RC, start, head_CM)
    d_R = draft.state.log_total_R - draft.state.logit_R
    kept_nR[CE] = torch.logaddexp(d_R, torch.zeros_like(d_R))
    kept_nR[WRONG] = d_R.sigmoid()
    log_total_R = _keep_normaliser(draft.state, kept_nR[REFERENCE : FACTOR + 1])
    if teacher is not None:
        theirs = teacher.state
        log_theirs_R = _keep_normaliser(theirs, kept_nR[TEACHER_REFERENCE : TEACHER_FACTOR + 1])
        of_label_R = (theirs.logit_R - log_theirs_R).exp() * (theirs.logit_R - draft.state.logit_R)
        of_others_R = gap_R * (theirs.reference_R - log_theirs_R).exp()
        kept_nR[KL] = of_others_R + of_label_R - log_theirs_R + log_total_R
    return draft.state.correct_R


def _keep_normaliser(state: RowState, kept_2R: Tensor) -> Tensor:
    """Reference and factor of the softmax over all tokens, the hidden label included; the log of their sum, float64."""
    reference_R = torch.maximum(state.reference_R, state.logit_R)
    others_R = state.total_R * (state.reference_R - reference_R).double().exp()
    total_R = others_R + (state.logit_R - reference_R).double().exp()
    kept_2R[0], kept_2R[1] = reference_R, 1 / total_R
    return total_R.log() + reference_R


def _measure(tiles: Tiles, slots: _Slots, kept_nR: Tensor) -> None:
    """The second sweep, with the normalisers: fills in l1, overlap, above and below."""
    assert slots.teacher_WM is not None
    sums = _on(tiles.device, distance_sums)
    draft, teacher = TileLogits(tiles, slots.hidden_WM, slots.bias), TileLogits(tiles, slots.teacher_WM)
    normalisers = _apart(kept_nR[REFERENCE:])
    total_nR = kept_nR.new_zeros(BELOW + 1 - L1, kept_nR.shape[1], dtype=torch.float64)
    for start, head_CM in tiles:
        total_nR += sums(draft(start, head_CM, 0), teacher(start, head_CM, 1), *normalisers)
    kept_nR[L1 : BELOW + 1] = total_nR


def _slopes(
    tiles: Tiles,
    slots: _Slots,
    kept_nR: Tensor,
    upstream: list[Tensor | None],
    needed: list[bool],
    table_sum_Vr: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The sweep of the backward pass: the sums for hidden [R, M] and latents [R, r]; adds to the table's."""
    slope = _on(tiles.device, tile_slope)
    draft = TileLogits(tiles, slots.hidden_WM, slots.bias)
    teacher = None if slots.teacher_WM is None else TileLogits(tiles, slots.teacher_WM)
    of_rows = (*upstream, *_apart(kept_nR[ABOVE:]))
    hidden_sum_RM = torch.zeros_like(slots.hidden_WM, dtype=tiles.dtype)
    width = 0 if draft.latent_Rr is None else draft.latent_Rr.shape[1]
    latent_sum_Rr = hidden_sum_RM.new_zeros(len(hidden_sum_RM), width)
    for start, head_CM in tiles:
        logits_RC = draft(start, head_CM, 0)
        teacher_RC = None if teacher is None else teacher(start, head_CM, 1)
        slope_RC = slope(logits_RC, teacher_RC, slots.labels_W - start, head_CM.dtype, *of_rows)
        if needed[0]:
            add_product(hidden_sum_RM, slope_RC, head_CM)
        if needed[1]:
            add_product(latent_sum_Rr, slope_RC, draft.table_Cr(start, len(head_CM)))
        if table_sum_Vr is not None:
            add_product(table_sum_Vr[start : start + len(head_CM)], slope_RC.T, draft.latent_Rr)
    return hidden_sum_RM, latent_sum_Rr


def _apart(values_nR: Tensor) -> list[Tensor]:
    """The rows, each with its own memory: a compiled function would look at the sizes of what they are views of."""
    return [values_R.clone() for values_R in values_nR]


def distance_sums(
    logits_RC: Tensor,
    teacher_RC: Tensor,
    reference_R: Tensor,
    factor_R: Tensor,
    teacher_reference_R: Tensor,
    teacher_factor_R: Tensor,
) -> Tensor:
    """A tile's part of l1, overlap, above and below, [4, R]."""
    q_RC = _probabilities(logits_RC, reference_R, factor_R)
    p_RC = _probabilities(teacher_RC, teacher_reference_R, teacher_factor_R)
    overlap_R = torch.minimum(q_RC, p_RC).sum(dim=1)
    gap_RC = q_RC - p_RC
    above_RC = _share_above(gap_RC).mul_(q_RC)
    below_R = q_RC.sub_(above_RC).sum(dim=1)
    return torch.stack((gap_RC.abs_().sum(dim=1), overlap_R, above_RC.sum(dim=1), below_R))


def tile_slope(
    logits_RC: Tensor,
    teacher_RC: Tensor | None,
    column_R: Tensor,
    dtype: torch.dtype,
    of_ce_R: Tensor | None,
    of_kl_R: Tensor | None,
    of_l1_R: Tensor | None,
    above_R: Tensor,
    below_R: Tensor,
    wrong_R: Tensor,
    reference_R: Tensor,
    factor_R: Tensor,
    teacher_reference_R: Tensor,
    teacher_factor_R: Tensor,
) -> Tensor:
    """The loss's slope in the logits of a tile, [R, C] in dtype; column_R: the label's, maybe outside the tile."""
    q_RC = _probabilities(logits_RC, reference_R, factor_R)
    slopes = []
    if teacher_RC is not None:
        p_RC = _probabilities(teacher_RC, teacher_reference_R, teacher_factor_R)
        if of_l1_R is not None:
            steps = [(2 * of_l1_R * mass_R)[:, None] for mass_R in (-above_R, below_R)]
            slopes.append(torch.lerp(*steps, _share_above(q_RC - p_RC)).mul_(q_RC))  # both ends keep their digits
        if of_kl_R is not None:
            slopes.append((q_RC - p_RC).mul_(of_kl_R[:, None]))
    if of_ce_R is not None:
        inside_R = (column_R >= 0) & (column_R < logits_RC.shape[1])
        within_R1 = column_R.clamp(0, logits_RC.shape[1] - 1)[:, None]
        own_R1 = torch.where(inside_R[:, None], -wrong_R[:, None], q_RC.gather(1, within_R1))
        slopes.append(q_RC.scatter_(1, within_R1, own_R1).mul_(of_ce_R[:, None]))
    total_RC = slopes[0]
    for slope_RC in slopes[1:]:
        total_RC.add_(slope_RC)
    return total_RC.to(dtype)


def _share_above(gap_RC: Tensor) -> Tensor:
    """1 where the gap is positive, 0 where it is negative, and 1/2 where it is zero."""
    return gap_RC.sign().add_(1).mul_(0.5)


def _probabilities(logits_RC: Tensor, reference_R: Tensor, factor_R: Tensor) -> Tensor:
    return (logits_RC - reference_R[:, None]).exp_().mul_(factor_R[:, None])


def _on(device: torch.device, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, compiled where that is worth its while."""
    return _compiled(function) if device.type == "cuda" else function


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return compiled(function, fullgraph=True)
