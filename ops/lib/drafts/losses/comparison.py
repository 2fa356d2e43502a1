"""The draft's distribution beside the label and the target's: with a bias, and more than one distance.

The draft's logits are x = h W^T + z T^T: W the target's frozen head, T [V, r] a trained table, z the slot's latent
(DSpark, arXiv 2607.05147, calls T w2). The teacher's are y = t W^T. A soft cap applies to either product, before z T^T
is added; the slope in h gets the slope of the draft's cap as a factor. With q = softmax(x), p = softmax(y), label l:

    ce       -log q_l             slope in x_v:  q_v - [v = l]
    kl       sum p log(p / q)                    q_v - p_v
    l1       sum |q - p|                         2 q_v below where q_v > p_v,  -2 q_v above where q_v < p_v
    overlap  sum min(p, q) = 1 - l1 / 2          -1/2 of l1's

above and below are the draft's probability of all tokens with q > p, and with q < p. Where q_v = p_v, half of q_v
counts to each and the slope is the mean of both, as |.| has the slope 0 at 0: equal distributions have none. (As
q_v times sign(q_v - p_v) minus its mean over q, it would lose its digits where the distributions hardly overlap.)

A slope needs the slot's normalisers and masses, so a few rows are computed at a time with their whole vocabulary, which
is in memory until their slope is taken. What a table's gradient takes from a slot needs the weight of the slot as well.
`compare_and_sum` knows it, and makes the gradients in the forward pass; `compare` waits for the backward pass, where it
makes the logits again. Products with M columns, for logits, the teacher's, and gradients: 3 and 5, without a teacher
2 and 3. The teacher's logits are those of a position: slots of several blocks that predict the same token share them.

In both softmaxes the label is kept out of the sum, as in head.py: the cross-entropy keeps its digits, and equal logits
give equal bits.

Legend: W weighted slots, R of them at a time, U rows of the teacher, M hidden size, V vocabulary, r width of latents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.lib.drafts.losses.head import Bias, add_product, cap_, cap_slope, check_labels, set_product
from ops.lib.drafts.losses.whole_rows import Side, Weights, WholeRows, choose_rows
from ops.lib.kernels.device import to_device
from ops.lib.target.embedding_and_head import AnyHead, SoftCaps, folded

CPU_LOGITS, CPU_ROWS = 2**20, 32  # 4 MiB in float32, but not fewer rows: products of a few are slow
CUDA_LOGITS = 2**28  # 1 GiB in float32: products at full speed, and the head is read a few times
CAST = 4096  # tokens whose rows of the head are cast at a time


@frozen(eq=False)
class Comparison:
    """Measures of each slot, [W], in float32 (float64 for float64 inputs); None if not requested.

    correct_W: whether the draft's best token, with its bias, is the label; of equal logits the first counts.
    """

    ce_W: Tensor
    kl_W: Tensor | None
    l1_W: Tensor | None
    overlap_W: Tensor | None
    correct_W: Tensor


# (the comparison of some slots, which ones) -> a loss, [], differentiable in the comparison
Objective = Callable[[Comparison, Tensor], Tensor]


def compare(
    hidden_WM: Tensor,
    head: AnyHead,
    labels_W: Tensor,
    teacher_WM: Tensor | None = None,
    bias: Bias | None = None,
    *,
    divergence: bool = True,
    distances: bool = True,
    alike_W: Tensor | None = None,
    checked: bool = False,
) -> Comparison:
    """Compare the draft's logits with labels and a teacher: cross-entropy, and if requested kl, l1 and overlap.

    All are differentiable with respect to hidden_WM and the bias's latents and table, in one common backward pass.
    divergence, distances: whether to compute kl, and l1 with overlap. alike_W, int64, always on the CPU: slots with the
    same number have equal teacher rows, whose logits are computed once.
    dtypes of products, `checked` and IndexError are as in `head_cross_entropy`. Memory: the gradients (the table's in
    at least float32), and both sides' logits of some slots.
    """
    given = _given(hidden_WM, head, labels_W, teacher_WM, bias, alike_W, checked)
    wanted = _Wanted(divergence and teacher_WM is not None, distances and teacher_WM is not None)
    found = Comparison(*_Comparison.apply(wanted, given.shared, given.caps, *given.tensors))
    return found if given.order_W is None else _ordered(found, given.order_W.argsort())


def compare_and_sum(
    hidden_WM: Tensor,
    head: AnyHead,
    labels_W: Tensor,
    teacher_WM: Tensor | None,
    bias: Bias | None,
    objective: Objective,
    *,
    divergence: bool = True,
    distances: bool = True,
    alike_W: Tensor | None = None,
    checked: bool = False,
) -> tuple[Tensor, Comparison]:
    """The sum of an objective over all slots, float64 [], and their comparison without gradient.

    The sum is differentiable like the results of `compare`, whose arguments it takes. The objective is called for one
    part of the slots after another, and not again in the backward pass.
    """
    given = _given(hidden_WM, head, labels_W, teacher_WM, bias, alike_W, checked)
    wanted = _Wanted(divergence and teacher_WM is not None, distances and teacher_WM is not None)
    needed = any(tensor is not None and tensor.requires_grad for tensor in given.tensors[:3])
    ordered = objective
    if given.order_W is not None:
        order_W = given.order_W

        def ordered(found: Comparison, slots: Tensor) -> Tensor:
            return objective(found, order_W[slots])

    with_gradient = torch.is_grad_enabled() and needed
    total, *values = _Sum.apply(wanted, given.shared, given.caps, ordered, with_gradient, *given.tensors)
    found = Comparison(*values)
    return total, found if given.order_W is None else _ordered(found, given.order_W.argsort())


@frozen
class _Wanted:
    divergence: bool
    distances: bool


@frozen(eq=False)
class _Shared:
    """The teacher's row of each slot, int64, ascending; on the host, for cutting, and on the device."""

    of_W: Tensor
    on_device_W: Tensor


@frozen(eq=False)
class _Given:
    """The tensors of a comparison, with the slots in the order order_W.

    tensors: hidden, latents, table, the teacher's rows, the head, labels; with the caps as `folded` gives them. shared:
    where slots share rows of the teacher.
    """

    tensors: tuple[Tensor | None, ...]
    caps: SoftCaps
    shared: _Shared | None = None
    order_W: Tensor | None = None


def _given(
    hidden_WM: Tensor,
    head: AnyHead,
    labels_W: Tensor,
    teacher_WM: Tensor | None,
    bias: Bias | None,
    alike_W: Tensor | None,
    checked: bool,
) -> _Given:
    """Slots that are alike side by side, with one row of the teacher for them. Their order and number are made on the
    host, which then waits for no device."""
    head_VM, hidden_WM, teacher_WM, caps = folded(head, hidden_WM, teacher_WM)
    if not checked:
        check_labels(labels_W, head_VM)
    latent_Wr, table_Vr = (None, None) if bias is None else (bias.latent_Wr, bias.table_Vr)
    labels_W = labels_W.to(torch.int64)
    if teacher_WM is None or alike_W is None or not len(labels_W):
        return _Given((hidden_WM, latent_Wr, table_Vr, teacher_WM, head_VM, labels_W), caps)
    sorted_W, order_W = alike_W.sort(stable=True)
    is_first_W = torch.cat((torch.ones(1, dtype=torch.bool), sorted_W[1:] != sorted_W[:-1]))
    of_W = is_first_W.cumsum(0) - 1
    together = to_device(torch.cat((order_W, of_W, order_W[is_first_W])), labels_W.device)
    order_W, on_device_W, first_U = together.tensor_split([len(of_W), 2 * len(of_W)])
    latent_Wr = None if latent_Wr is None else latent_Wr.index_select(0, order_W)
    tensors = (
        *(hidden_WM.index_select(0, order_W), latent_Wr, table_Vr),
        *(teacher_WM.index_select(0, first_U), head_VM, labels_W.index_select(0, order_W)),
    )
    return _Given(tensors, caps, _Shared(of_W, on_device_W), order_W)


def _ordered(found: Comparison, order_W: Tensor) -> Comparison:
    values = (found.ce_W, found.kl_W, found.l1_W, found.overlap_W, found.correct_W)
    return Comparison(*(None if value_W is None else value_W.index_select(0, order_W) for value_W in values))


# The rows of `found_nW`: the measures of each slot.
CE, KL, L1, OVERLAP, ABOVE, BELOW = range(6)


class _Comparison(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, wanted: _Wanted, shared: _Shared | None, caps: SoftCaps, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        slots = _Slots(shared, caps, *tensors)
        found_nW, correct_W = slots.not_measured()
        for rows in slots.chunks():
            found_nW[:, rows], correct_W[rows] = slots.softmaxes(rows, wanted.divergence).measured(wanted.distances)
        ctx.mark_non_differentiable(correct_W)
        ctx.set_materialize_grads(False)  # no gradient for results that the loss does not use
        ctx.shared, ctx.caps = shared, caps
        ctx.save_for_backward(*tensors, found_nW[ABOVE:].clone())
        return *_values(found_nW, wanted), correct_W

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
        *tensors, masses_2W = ctx.saved_tensors
        weights = Weights(of_ce_W, of_kl_W, _of_l1(of_l1_W, of_overlap_W), *masses_2W)
        slots = _Slots(ctx.shared, ctx.caps, *tensors)
        gradients = _Gradients(slots, ctx.needs_input_grad[3:6])
        for rows in slots.chunks():
            softmaxes = slots.softmaxes(rows, with_teacher=of_kl_W is not None or weights.of_l1_R is not None)
            gradients.add(rows, softmaxes.slope(_of(weights, rows)))
        return None, None, None, *_cast(gradients.tensors, tensors[:3]), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        wanted: _Wanted,
        shared: _Shared | None,
        caps: SoftCaps,
        objective: Objective,
        with_gradient: bool,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        slots = _Slots(shared, caps, *tensors)
        found_nW, correct_W = slots.not_measured()
        gradients = _Gradients(slots, ctx.needs_input_grad[5:8] if with_gradient else (False,) * 3)
        total = slots.hidden_WM.new_zeros((), dtype=torch.float64)
        numbers_W = torch.arange(len(slots.hidden_WM), device=slots.hidden_WM.device)
        for rows in slots.chunks():
            softmaxes = slots.softmaxes(rows, wanted.divergence)
            found_nW[:, rows], correct_W[rows] = softmaxes.measured(wanted.distances)
            comparison = _comparison(found_nW[:, rows], correct_W[rows], wanted)
            if with_gradient:
                value, weights = _weighed(objective, comparison, numbers_W[rows], found_nW[ABOVE:, rows])
                gradients.add(rows, softmaxes.slope(weights))
            else:
                value = objective(comparison, numbers_W[rows])
            total += value
        values = (*_values(found_nW, wanted), correct_W)
        ctx.mark_non_differentiable(*(value_W for value_W in values if value_W is not None))
        ctx.save_for_backward(*tensors[:3], *gradients.tensors)
        return total, *values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor, *_others: Tensor) -> tuple[Tensor | None, ...]:
        leaves, gradients = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        # In place: nobody else reads them, and torch refuses a second backward pass.
        scaled = [None if each is None else each.mul_(of_total.to(each.dtype)) for each in gradients]
        return None, None, None, None, None, *_cast(scaled, leaves), None, None, None


def _cast(gradients: Sequence[Tensor | None], leaves: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients, each in the dtype of its leaf."""
    pairs = zip(gradients, leaves, strict=True)
    return [None if each is None or leaf is None else each.to(leaf.dtype) for each, leaf in pairs]


def _values(found_nW: Tensor, wanted: _Wanted) -> tuple[Tensor | None, ...]:
    """The measures ce, kl, l1 and overlap as separate tensors; None for those not wanted."""
    is_wanted = (True, wanted.divergence, wanted.distances, wanted.distances)
    return tuple(found_nW[place].clone() if wants else None for place, wants in enumerate(is_wanted))


def _comparison(found_nW: Tensor, correct_W: Tensor, wanted: _Wanted) -> Comparison:
    ce_W, kl_W, l1_W, overlap_W = _values(found_nW, wanted)
    assert ce_W is not None
    return Comparison(ce_W, kl_W, l1_W, overlap_W, correct_W)


def _weighed(objective: Objective, values: Comparison, slots_R: Tensor, masses_2R: Tensor) -> tuple[Tensor, Weights]:
    """The objective of some slots, and its derivative by each of their measures. masses_2R: above and below."""
    leaves = [values.ce_W, values.kl_W, values.l1_W, values.overlap_W]
    present = [leaf.requires_grad_() for leaf in leaves if leaf is not None]
    with torch.enable_grad():
        value = objective(values, slots_R)
    slopes = iter(torch.autograd.grad(value, present, allow_unused=True))
    of_ce_R, of_kl_R, of_l1_R, of_overlap_R = (None if leaf is None else next(slopes) for leaf in leaves)
    above_R, below_R = masses_2R
    return value.detach(), Weights(of_ce_R, of_kl_R, _of_l1(of_l1_R, of_overlap_R), above_R.clone(), below_R.clone())


def _of_l1(of_l1_W: Tensor | None, of_overlap_W: Tensor | None) -> Tensor | None:
    """The weight of l1's derivative, including the overlap's part, whose derivative is -1/2 of l1's."""
    if of_overlap_W is None:
        return of_l1_W
    return of_overlap_W / -2 if of_l1_W is None else of_l1_W - of_overlap_W / 2


def _of(weights: Weights, rows: slice) -> Weights:
    """The weights of some slots, copied: compiled functions would depend on the size of a viewed tensor."""
    given = (weights.of_ce_R, weights.of_kl_R, weights.of_l1_R, weights.above_R, weights.below_R)
    return Weights(*(None if values_W is None else values_W[rows].clone() for values_W in given))


class _Slots:
    """The slots of a comparison, and the logits of some of them at a time.

    dtype: of logits, sums and values; product: of the factors of products. Both as in head.py's Tiles. slope_RV: of the
    draft's soft cap, for the slots whose logits were made last.
    """

    def __init__(
        self,
        shared: _Shared | None,
        caps: SoftCaps,
        hidden_WM: Tensor,
        latent_Wr: Tensor | None,
        table_Vr: Tensor | None,
        teacher_UM: Tensor | None,
        head_VM: Tensor,
        labels_W: Tensor,
    ) -> None:
        self.hidden_WM, self.latent_Wr, self.table_Vr = hidden_WM, latent_Wr, table_Vr
        self.teacher_UM, self.shared, self.head_VM, self.labels_W = teacher_UM, shared, head_VM, labels_W
        self.caps = caps
        self.dtype = torch.promote_types(hidden_WM.dtype, torch.float32)
        self.product = hidden_WM.dtype if hidden_WM.is_cuda else self.dtype
        self.functions = choose_rows(hidden_WM.device, self.dtype, self.product)
        self.rows = min(rows_at_once(hidden_WM.device, len(head_VM)), len(hidden_WM))
        sides = 1 if teacher_UM is None else 2
        self._memory_NV = hidden_WM.new_empty(sides * self.rows, len(head_VM), dtype=self.dtype)
        self.slope_RV = None if caps.own is None else torch.empty_like(self._memory_NV[: self.rows])

    def not_measured(self) -> tuple[Tensor, Tensor]:
        """Empty results for all slots, to be filled in: zeros [n, W], and the flags of correct slots."""
        count = len(self.hidden_WM)
        found_nW = self.hidden_WM.new_zeros(BELOW + 1, count, dtype=self.dtype)
        return found_nW, torch.empty_like(self.labels_W, dtype=torch.bool)

    def chunks(self) -> list[slice]:
        """Slices of at most `rows` slots, equal except the last."""
        count = len(self.hidden_WM)
        if not count:
            return []
        size = -(-count // -(-count // self.rows))
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def columns(self) -> list[slice]:
        """Slices of the vocabulary: all of it, or as much of the head as is cast at a time."""
        size = len(self.head_VM) if self.head_VM.dtype == self.product else CAST
        return [slice(start, start + size) for start in range(0, len(self.head_VM), size)]

    def softmaxes(self, rows: slice, divergence: bool = False, *, with_teacher: bool = True) -> _Softmaxes:
        """The softmaxes of some slots; they reuse the logits memory of earlier slots."""
        hidden_RM, labels_R = self.hidden_WM[rows], self.labels_W[rows].clone()  # in memory of their own, as in `_of`
        if self.teacher_UM is None or not with_teacher:
            draft_RV = self._logits(hidden_RM, rows)
            return _Softmaxes(self.functions, labels_R, self.functions.normalised(draft_RV, labels_R))
        of_R, teacher_labels_U = None, labels_R
        if self.shared is None:
            draft_RV = self._logits(hidden_RM, rows)
            teacher_UV = self._logits(self.teacher_UM[rows], None, self.rows)
        else:  # a product of both, as there are few rows of the teacher
            first, last = int(self.shared.of_W[rows.start]), int(self.shared.of_W[rows.stop - 1])
            of_R = self.shared.on_device_W[rows] - first
            teacher_labels_U = labels_R.new_empty(last + 1 - first).scatter_(0, of_R, labels_R)
            both_NM = torch.cat((hidden_RM, self.teacher_UM[first : last + 1].to(hidden_RM.dtype)))
            draft_RV, teacher_UV = self._logits(both_NM, rows).tensor_split([len(hidden_RM)])
        gap_R = self.functions.mean_gap(draft_RV, teacher_UV, of_R) if divergence else None
        draft = self.functions.normalised(draft_RV, labels_R)
        teacher = self.functions.normalised(teacher_UV, teacher_labels_U)
        return _Softmaxes(self.functions, labels_R, draft, teacher, of_R, gap_R)

    def _logits(self, states_NM: Tensor, rows: slice | None, place: int = 0) -> Tensor:
        """Logits [N, V], written from row `place` of the buffer on. rows: the slots whose bias the first states get."""
        out_NV, states_NM = self._memory_NV[place : place + len(states_NM)], states_NM.to(self.product)
        latent_Rr = None if rows is None or self.latent_Wr is None else self.latent_Wr[rows].to(self.product)
        own = 0 if rows is None else len(self.hidden_WM[rows])
        for part in self.columns():
            head_CM, out_NC = self.head_VM[part].to(self.product), out_NV[:, part]
            set_product(out_NC, states_NM, head_CM)
            if self.caps.own is not None and self.slope_RV is not None:
                cap_(out_NC[:own], self.caps.own)
                self.slope_RV[:own, part] = cap_slope(out_NC[:own], self.caps.own)
            if self.caps.teacher is not None:
                cap_(out_NC[own:], self.caps.teacher)
            if latent_Rr is not None and self.table_Vr is not None:
                add_product(out_NC[: len(latent_Rr)], latent_Rr, self.table_Vr[part].to(self.product).T)
        return out_NV


@frozen(eq=False)
class _Softmaxes:
    """The softmaxes of some slots, and of the teacher's rows for them. gap_R: part of the divergence."""

    functions: WholeRows
    labels_R: Tensor
    draft: Side
    teacher: Side | None = None
    of_R: Tensor | None = None
    gap_R: Tensor | None = None

    def measured(self, distances: bool) -> tuple[Tensor, Tensor]:
        """The measures of each slot, [n, R], and whether each is correct."""
        found_nR = self.draft.d_N.new_zeros(BELOW + 1, len(self.labels_R))
        found_nR[CE] = torch.logaddexp(self.draft.d_N, torch.zeros_like(self.draft.d_N))
        if self.gap_R is not None and self.teacher is not None:
            of_teacher_U = self.teacher.log_total_N
            of_teacher_R = of_teacher_U if self.of_R is None else of_teacher_U.index_select(0, self.of_R)
            found_nR[KL] = self.gap_R + (self.draft.log_total_N - of_teacher_R)
        if distances and self.teacher is not None:
            found_nR[L1:] = self.functions.distances(self.draft, self.teacher, self.of_R)
        return found_nR.to(self.draft.values_NV.dtype), self.draft.correct_N

    def slope(self, weights: Weights) -> Tensor:
        """The derivative of the weighted sum by the logits, [R, V]; it overwrites what was measured."""
        return self.functions.slope(self.draft, self.teacher, self.of_R, self.labels_R, weights)


class _Gradients:
    """The gradients of hidden states, latents and table, as far as needed, in the dtype of sums."""

    def __init__(self, slots: _Slots, needed: Sequence[bool]) -> None:
        self.slots = slots
        leaves = zip((slots.hidden_WM, slots.latent_Wr, slots.table_Vr), needed, strict=True)
        self.tensors = [
            torch.zeros_like(leaf, dtype=slots.dtype) if leaf is not None and is_needed else None
            for leaf, is_needed in leaves
        ]

    def add(self, rows: slice, slope_RV: Tensor) -> None:
        """Add some slots' part to the gradients. slope_RV: derivative by their logits, in the dtype of products."""
        slots = self.slots
        hidden_sum_WM, latent_sum_Wr, table_sum_Vr = self.tensors
        if hidden_sum_WM is not None:
            for part in slots.columns():
                of_product_RC = slope_RV[:, part]
                if slots.slope_RV is not None:
                    of_product_RC = (of_product_RC * slots.slope_RV[: len(slope_RV), part]).to(slope_RV.dtype)
                add_product(hidden_sum_WM[rows], of_product_RC, slots.head_VM[part].to(slots.product))
        if slots.latent_Wr is None or slots.table_Vr is None:
            return
        if latent_sum_Wr is not None:
            add_product(latent_sum_Wr[rows], slope_RV, slots.table_Vr.to(slots.product))
        if table_sum_Vr is not None:
            add_product(table_sum_Vr, slope_RV.T, slots.latent_Wr[rows].to(slots.product))


def rows_at_once(device: torch.device, vocabulary: int) -> int:
    """The number of slots whose logits are in memory at a time."""
    if device.type == "cuda":
        return max(1, CUDA_LOGITS // vocabulary)
    return max(CPU_ROWS, CPU_LOGITS // vocabulary)
