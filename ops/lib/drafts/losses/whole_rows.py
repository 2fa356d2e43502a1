"""What is computed of whole rows of the draft's logits, beside the target's: softmaxes, distances, slopes.

The functions in torch define those in C (comparison.c), which one or two threads of a CPU use for float32, and are what
CUDA compiles. `Side.values_NV` are logits; C replaces them by exp(logit - reference).

Legend: N rows of either side, R of the draft, U of the target, V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from ops.lib.drafts.losses.tiled_softmax import FEW_THREADS
from ops.lib.kernels.c_library import compiled_comparison
from ops.lib.kernels.device import compiled


@frozen(eq=False)
class Side:
    """The softmax of some rows: a probability is exp(logit - reference) * factor, in the dtype of the values.

    log_total_N: the log of the sum of exp(logit), float64. d_N: the log of the ratio of the other tokens' probability
    to the label's, float64, without loss of digits. correct_N: whether the label is the first best token.
    """

    values_NV: Tensor
    reference_N: Tensor
    factor_N: Tensor
    log_total_N: Tensor
    d_N: Tensor
    correct_N: Tensor


@frozen(eq=False)
class Weights:
    """The weights of each row's losses, and further values for their gradients; see comparison.py."""

    of_ce_R: Tensor | None
    of_kl_R: Tensor | None
    of_l1_R: Tensor | None
    above_R: Tensor | None
    below_R: Tensor | None


class WholeRows(Protocol):
    """The functions that compare whole rows of logits on one kind of device.

    of_R, int64, in all of them: the target's row for each row of the draft; None for the row of the same number.
    """

    def normalised(self, logits_NV: Tensor, labels_N: Tensor) -> Side:
        """The softmax of some rows; it may overwrite the logits."""

    def mean_gap(self, logits_RV: Tensor, teacher_UV: Tensor, of_R: Tensor | None) -> Tensor:
        """The mean difference of logits under the target's distribution, sum p (y - x), float64 [R].

        y: the target's logits. x: the draft's. p: softmax(y).
        """

    def distances(self, draft: Side, teacher: Side, of_R: Tensor | None) -> Tensor:
        """The sums l1, overlap, above and below of each row, float64 [4, R]."""

    def slope(
        self, draft: Side, teacher: Side | None, of_R: Tensor | None, labels_R: Tensor, weights: Weights
    ) -> Tensor:
        """The derivative of the weighted losses by the logits, [R, V], in the dtype of products.

        It may overwrite the draft's values.
        """


def choose_rows(device: torch.device, dtype: torch.dtype, product: torch.dtype) -> WholeRows:
    """The fastest implementation for rows of this dtype. product: the dtype of factors of products."""
    is_fast = device.type == "cpu" and dtype == torch.float32 and torch.get_num_threads() <= FEW_THREADS
    library = compiled_comparison() if is_fast else None
    return TorchRows(device, product) if library is None else CRows(library)


@frozen
class TorchRows:
    """Computes whole rows by torch; on CUDA compiled."""

    device: torch.device
    product: torch.dtype

    def normalised(self, logits_NV: Tensor, labels_N: Tensor) -> Side:
        return _side(logits_NV, *_on(self.device, normaliser)(logits_NV, labels_N))

    def mean_gap(self, logits_RV: Tensor, teacher_UV: Tensor, of_R: Tensor | None) -> Tensor:
        return _on(self.device, row_gaps)(logits_RV, teacher_UV, of_R)

    def distances(self, draft: Side, teacher: Side, of_R: Tensor | None) -> Tensor:
        return _on(self.device, distance_sums)(*_softmax(draft), *_softmax(teacher), of_R)

    def slope(
        self, draft: Side, teacher: Side | None, of_R: Tensor | None, labels_R: Tensor, weights: Weights
    ) -> Tensor:
        theirs = (None, None, None) if teacher is None else _softmax(teacher)
        wrong_R = draft.d_N.sigmoid().to(draft.values_NV.dtype)
        given = (weights.of_ce_R, weights.of_kl_R, weights.of_l1_R, weights.above_R, weights.below_R)
        return _on(self.device, row_slope)(*_softmax(draft), *theirs, of_R, labels_R, wrong_R, *given, self.product)


@frozen(eq=False)
class CRows:
    """Computes whole rows by comparison.c."""

    library: ctypes.CDLL

    def normalised(self, logits_NV: Tensor, labels_N: Tensor) -> Side:
        count = len(logits_NV)
        reference_N, own_N = logits_NV.new_empty(count), logits_NV.new_empty(count)
        others_N, correct_N = own_N.double(), labels_N.bool()
        outputs = (reference_N, others_N, own_N, correct_N)
        self.library.normalise(logits_NV.data_ptr(), *logits_NV.shape, *_pointers(labels_N, *outputs))
        return _side(logits_NV, *outputs)

    def mean_gap(self, logits_RV: Tensor, teacher_UV: Tensor, of_R: Tensor | None) -> Tensor:
        of_R, gap_R = _numbers(logits_RV, of_R), logits_RV.new_empty(len(logits_RV), dtype=torch.float64)
        self.library.mean_gap(*_pointers(logits_RV, teacher_UV, of_R), *logits_RV.shape, gap_R.data_ptr())
        return gap_R

    def distances(self, draft: Side, teacher: Side, of_R: Tensor | None) -> Tensor:
        values_RV = draft.values_NV
        of_R, sums_4R = _numbers(values_RV, of_R), values_RV.new_empty(4, len(values_RV), dtype=torch.float64)
        factors = _pointers(draft.factor_N, teacher.factor_N)
        rows = _pointers(values_RV, teacher.values_NV, of_R)
        self.library.distances(*rows, *values_RV.shape, *factors, sums_4R.data_ptr())
        return sums_4R

    def slope(
        self, draft: Side, teacher: Side | None, of_R: Tensor | None, labels_R: Tensor, weights: Weights
    ) -> Tensor:
        values_RV = draft.values_NV
        of_R, wrong_R = _numbers(values_RV, of_R), draft.d_N.sigmoid().float()
        none_R = torch.zeros_like(wrong_R)
        given = (weights.above_R, weights.below_R, weights.of_ce_R, weights.of_kl_R, weights.of_l1_R)
        present = [none_R if value_R is None else value_R.float().contiguous() for value_R in given]
        theirs = (None, None) if teacher is None else _pointers(teacher.values_NV, teacher.factor_N)
        self.library.slope(
            *(values_RV.data_ptr(), theirs[0], of_R.data_ptr()),
            *(*values_RV.shape, labels_R.data_ptr(), draft.factor_N.data_ptr(), theirs[1]),
            *_pointers(wrong_R, *present),
        )
        return values_RV


def _side(values_NV: Tensor, reference_N: Tensor, others_N: Tensor, own_N: Tensor, correct_N: Tensor) -> Side:
    """A `Side` from its parts. others_N: sum of exp(logit - reference) without the label. own_N: the label's logit."""
    lead_N = own_N.double() - reference_N.double()
    total_N = others_N + lead_N.exp()
    return Side(
        values_NV,
        reference_N,
        (1 / total_N).to(reference_N.dtype),
        total_N.log() + reference_N,
        others_N.log() - lead_N,
        correct_N,
    )


def _softmax(side: Side) -> tuple[Tensor, Tensor, Tensor]:
    return side.values_NV, side.reference_N, side.factor_N


def _beside(values_N: Tensor, of_R: Tensor | None) -> Tensor:
    return values_N if of_R is None else values_N.index_select(0, of_R)


def _numbers(values_RV: Tensor, of_R: Tensor | None) -> Tensor:
    return torch.arange(len(values_RV)) if of_R is None else of_R.contiguous()


def _pointers(*tensors: Tensor) -> list[int]:
    assert all(tensor.is_contiguous() for tensor in tensors)
    return [tensor.data_ptr() for tensor in tensors]


def normaliser(logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, ...]:
    """The arguments reference, others, own and correct of `_side`, computed from logits and labels."""
    own_N = logits_NV.gather(1, labels_N[:, None])[:, 0]
    reference_N = logits_NV.amax(dim=1)
    others_NV = _with_labels((logits_NV - reference_N[:, None]).exp_(), labels_N, torch.zeros_like(own_N))
    return reference_N, others_NV.sum(dim=1, dtype=torch.float64), own_N, logits_NV.argmax(dim=1) == labels_N


def row_gaps(logits_RV: Tensor, teacher_UV: Tensor, of_R: Tensor | None) -> Tensor:
    """The function `mean_gap` in torch."""
    teacher_RV = _beside(teacher_UV, of_R)
    p_RV = (teacher_RV - teacher_RV.amax(dim=1, keepdim=True)).exp()
    gap_R = (p_RV * (teacher_RV - logits_RV)).sum(dim=1, dtype=torch.float64)
    return gap_R / p_RV.sum(dim=1, dtype=torch.float64)


def distance_sums(
    logits_RV: Tensor,
    reference_R: Tensor,
    factor_R: Tensor,
    teacher_UV: Tensor,
    teacher_reference_U: Tensor,
    teacher_factor_U: Tensor,
    of_R: Tensor | None,
) -> Tensor:
    """The function `distances` in torch."""
    q_RV = _probabilities(logits_RV, reference_R, factor_R)
    p_RV = _probabilities(
        *(_beside(values_U, of_R) for values_U in (teacher_UV, teacher_reference_U, teacher_factor_U))
    )
    overlap_R = torch.minimum(q_RV, p_RV).sum(dim=1, dtype=torch.float64)
    gap_RV = q_RV - p_RV
    above_RV = _share_above(gap_RV).mul_(q_RV)
    below_R = q_RV.sub_(above_RV).sum(dim=1, dtype=torch.float64)
    above_R = above_RV.sum(dim=1, dtype=torch.float64)
    return torch.stack((gap_RV.abs_().sum(dim=1, dtype=torch.float64), overlap_R, above_R, below_R))


def row_slope(
    logits_RV: Tensor,
    reference_R: Tensor,
    factor_R: Tensor,
    teacher_UV: Tensor | None,
    teacher_reference_U: Tensor | None,
    teacher_factor_U: Tensor | None,
    of_R: Tensor | None,
    labels_R: Tensor,
    wrong_R: Tensor,
    of_ce_R: Tensor | None,
    of_kl_R: Tensor | None,
    of_l1_R: Tensor | None,
    above_R: Tensor | None,
    below_R: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The function `slope` in torch, in this dtype. wrong_R: 1 - q of the label."""
    q_RV = _probabilities(logits_RV, reference_R, factor_R)
    slopes = []
    if teacher_UV is not None and teacher_reference_U is not None and teacher_factor_U is not None:
        theirs = (teacher_UV, teacher_reference_U, teacher_factor_U)
        p_RV = _probabilities(*(_beside(values_U, of_R) for values_U in theirs))
        if of_l1_R is not None and above_R is not None and below_R is not None:
            steps = [(2 * of_l1_R * mass_R)[:, None] for mass_R in (-above_R, below_R)]
            slopes.append(torch.lerp(*steps, _share_above(q_RV - p_RV)).mul_(q_RV))  # both ends keep their digits
        if of_kl_R is not None:
            slopes.append((q_RV - p_RV).mul_(of_kl_R[:, None]))
    if of_ce_R is not None:
        slopes.append(_with_labels(q_RV, labels_R, -wrong_R).mul_(of_ce_R[:, None]))
    total_RV = slopes[0]
    for slope_RV in slopes[1:]:
        total_RV.add_(slope_RV)
    return total_RV.to(dtype)


def _with_labels(values_RV: Tensor, labels_R: Tensor, given_R: Tensor) -> Tensor:
    """The values with those of the labels replaced; the values may be overwritten.

    In compiled code it avoids scatter, which would end a fused kernel and cost another pass over all values.
    """
    if not torch.compiler.is_compiling():
        return values_RV.scatter_(1, labels_R[:, None], given_R[:, None])
    columns_V = torch.arange(values_RV.shape[1], device=values_RV.device)
    return torch.where(columns_V == labels_R[:, None], given_R[:, None], values_RV)


def _share_above(gap_RV: Tensor) -> Tensor:
    """The value 1 where the gap is positive, 0 where it is negative, and 1/2 where it is zero."""
    return gap_RV.sign().add_(1).mul_(0.5)


def _probabilities(logits_RV: Tensor, reference_R: Tensor, factor_R: Tensor) -> Tensor:
    return (logits_RV - reference_R[:, None]).exp_().mul_(factor_R[:, None])


def _on(device: torch.device, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, compiled on CUDA only."""
    return _compiled(function) if device.type == "cuda" else function


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return compiled(function, fullgraph=True)
