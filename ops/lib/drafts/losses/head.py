"""Cross-entropy and KL divergence through the target's frozen head, tile by tile, without the logits.

The head W gets no gradient, so that of -log softmax(x W^T)[label] with respect to x is softmax(x W^T) W - W[label]: two
matrix products over a tile of logits (some rows, some of the vocabulary) that is dropped before the next one is made.
A row's exponentials are taken against a running reference, as in the online softmax (arXiv 1805.02867); what was
summed before is scaled when the reference rises. The label's own logit is kept out of the sums: with
d = log sum_{v != label} exp(logit_v) - logit_label, CE = log(1 + exp(d)) and the gradient is
sigmoid(d) (softmax over the others W - W[label]), so that neither loses its digits where the label is almost certain.

Logits may be scale * (x W^T + b), with a soft cap c tanh(x / c) over them (`Head`). Scale and b are folded into the
states and one more column of W. A soft cap is applied to each tile; its slope weighs the rows of W in the gradient.

A draft may add a bias to these logits, z T^T, of a latent z of the slot and a trained table T: comparison.py.

Legend: W weighted slots, R rows of a tile, C its columns, M hidden size, V vocabulary, r width of a bias's latents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.function import once_differentiable

from ops.lib.drafts.losses.candidates import BestTokens
from ops.lib.drafts.losses.tiled_softmax import RowState, Sweep, choose_sweep
from ops.lib.target.embedding_and_head import AnyHead, SoftCaps, folded

CPU_TILE = (512, 512)  # 1 MiB in float32: stays in the second-level cache between the two products
CUDA_TILE = (8192, 8192)  # 256 MiB in float32: large enough for the products' full speed


def head_cross_entropy(
    hidden_WM: Tensor, head: AnyHead, labels_W: Tensor, *, checked: bool = False
) -> tuple[Tensor, Tensor]:
    """The cross-entropy of every slot, -log softmax(hidden head^T)[label], [W], and whether its best token is the
    label.

    It is float32 (float64 for float64 inputs). Only hidden_WM gets a gradient, made in the forward pass if requested.
    Of equal best tokens the first counts, as in torch.argmax. V must be at least 2.
    Products have the inputs' dtype; on the CPU at least float32. Memory: the gradient [W, M], one tile of logits, and a
    tile's rows of sums [R, M].
    checked: the caller knows that all labels are valid; checking them waits for the device. Raises IndexError for a
    label outside the vocabulary, unless checked.
    """
    ce_W, correct_W, _ = head_cross_entropy_and_best(hidden_WM, head, labels_W, 0, checked=checked)
    return ce_W, correct_W


def head_cross_entropy_and_best(
    hidden_WM: Tensor, head: AnyHead, labels_W: Tensor, count: int, *, checked: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of every slot, and the `count` best tokens of every slot, int64 [W, count], best first."""
    head_VM, hidden_WM, _, caps = folded(head, hidden_WM)
    if not checked:
        check_labels(labels_W, head_VM)
    with_gradient = torch.is_grad_enabled() and hidden_WM.requires_grad
    return _CrossEntropy.apply(hidden_WM, head_VM, labels_W, with_gradient, count, caps.own)


def head_kl(
    hidden_WM: Tensor, teacher_WM: Tensor, head: AnyHead, labels_W: Tensor, *, checked: bool = False
) -> tuple[Tensor, Tensor]:
    """KL(softmax(teacher head^T) || softmax(hidden head^T)) of every slot [W], and whether its best token is the label.

    dtypes, gradient, checked and errors as in `head_cross_entropy`; four products instead of two, three tiles of
    logits. With a `Head` the teacher's logits are made by the target's settings.
    """
    head_VM, hidden_WM, taught_WM, caps = folded(head, hidden_WM, teacher_WM)
    if not checked:
        check_labels(labels_W, head_VM)
    with_gradient = torch.is_grad_enabled() and hidden_WM.requires_grad
    return _Divergence.apply(hidden_WM, taught_WM, head_VM, labels_W, with_gradient, caps)


def choose_head(device: torch.device) -> tuple[str, Sweep]:
    """The way to process logits on a device: a name for the log, and the function that processes a tile."""
    name, sweep = choose_sweep(device)
    rows, columns = _tile(device)
    return f"tiles of {rows} x {columns}, sweep: {name}", sweep


def check_labels(labels_W: Tensor, head_VM: Tensor) -> None:
    """Check that all labels are valid tokens; waits for the device. Raises IndexError."""
    if not len(labels_W):
        return
    least, most = (int(bound) for bound in labels_W.aminmax())
    if least < 0 or most >= len(head_VM):
        raise IndexError(f"labels from {least} to {most} do not fit a vocabulary of {len(head_VM)}")


def _tile(device: torch.device) -> tuple[int, int]:
    if device.type == "cuda":
        return CUDA_TILE
    rows, columns = CPU_TILE
    return rows, columns * torch.get_num_threads()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_WM: Tensor,
        head_VM: Tensor,
        labels_W: Tensor,
        with_gradient: bool,
        count: int,
        soft_cap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tiles = Tiles(hidden_WM, head_VM)
        best_WC = labels_W.new_empty(len(labels_W), count, dtype=torch.int64)
        ce_W = hidden_WM.new_empty(len(hidden_WM), dtype=tiles.dtype)
        correct_W = torch.empty_like(labels_W, dtype=torch.bool)
        gradient_WM = torch.empty_like(hidden_WM) if with_gradient else None
        for rows in tiles.chunks(len(hidden_WM)):
            softmax = HeadSoftmax(
                tiles, hidden_WM[rows], labels_W[rows], hide=True, with_gradient=with_gradient, soft_cap=soft_cap
            )
            best = BestTokens(len(hidden_WM[rows]), count, tiles.dtype, tiles.device)
            for start, head_CM in tiles:
                logits_RC = softmax.logits(head_CM, 0)
                if count:
                    best.add(logits_RC, start)
                softmax.add(logits_RC, start, head_CM)
            best_WC[rows] = best.tokens_RC
            d_R = softmax.state.log_total_R - softmax.state.logit_R
            ce_W[rows] = torch.logaddexp(d_R, torch.zeros_like(d_R)).to(tiles.dtype)
            correct_W[rows] = softmax.state.correct_R
            if gradient_WM is not None:
                own_RM = head_VM[labels_W[rows]].to(tiles.dtype)
                if soft_cap is not None:
                    own_RM.mul_(cap_slope(softmax.state.logit_R, soft_cap)[:, None])
                slope_RM = softmax.mean_RM.sub_(own_RM)
                gradient_WM[rows] = slope_RM.mul_(d_R.sigmoid().to(tiles.dtype)[:, None]).to(hidden_WM.dtype)
        ctx.mark_non_differentiable(correct_W, best_WC)
        ctx.save_for_backward(gradient_WM)
        return ce_W, correct_W, best_WC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ce_W: Tensor, *_others: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_WM,) = ctx.saved_tensors
        return gradient_WM * grad_ce_W.to(gradient_WM.dtype)[:, None], None, None, None, None, None


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_WM: Tensor,
        teacher_WM: Tensor,
        head_VM: Tensor,
        labels_W: Tensor,
        with_gradient: bool,
        caps: SoftCaps,
    ) -> tuple[Tensor, Tensor]:
        tiles = Tiles(hidden_WM, head_VM)
        kl_W = hidden_WM.new_empty(len(hidden_WM), dtype=tiles.dtype)
        correct_W = torch.empty_like(labels_W, dtype=torch.bool)
        gradient_WM = torch.empty_like(hidden_WM) if with_gradient else None
        for rows in tiles.chunks(len(hidden_WM)):
            draft = HeadSoftmax(
                tiles, hidden_WM[rows], labels_W[rows], hide=False, with_gradient=with_gradient, soft_cap=caps.own
            )
            teacher = HeadSoftmax(
                tiles, teacher_WM[rows], None, hide=False, with_gradient=with_gradient, soft_cap=caps.teacher
            )
            gap_R = torch.zeros_like(draft.state.total_R)  # sum exp(teacher - reference) (teacher - draft)
            for start, head_CM in tiles:
                draft_RC, teacher_RC = draft.logits(head_CM, 0), teacher.logits(head_CM, 1)
                teacher.slope_RC = draft.slope_RC  # of what the gradient goes through
                gap_R = add_gap(gap_R, draft_RC, teacher, teacher_RC, start, head_CM)
                draft.add(draft_RC, start, head_CM)
            kl_R = gap_R / teacher.state.total_R - teacher.state.log_total_R + draft.state.log_total_R
            kl_W[rows], correct_W[rows] = kl_R.to(tiles.dtype), draft.state.correct_R
            if gradient_WM is not None:
                gradient_WM[rows] = draft.mean_RM.sub_(teacher.mean_RM).to(hidden_WM.dtype)
        ctx.mark_non_differentiable(correct_W)
        ctx.save_for_backward(gradient_WM)
        return kl_W, correct_W

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl_W: Tensor, _grad_correct: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_WM,) = ctx.saved_tensors
        return gradient_WM * grad_kl_W.to(gradient_WM.dtype)[:, None], None, None, None, None, None


class Tiles:
    """The tiles of rows and vocabulary on a device, with dtypes, the sweep function, and buffers.

    dtype: of logits, sums and loss. product: of the factors of matrix products.
    """

    def __init__(self, hidden_WM: Tensor, head_VM: Tensor):
        self.head_VM = head_VM
        self.device = hidden_WM.device
        self.dtype = torch.promote_types(hidden_WM.dtype, torch.float32)
        self.product = hidden_WM.dtype if hidden_WM.is_cuda else self.dtype
        _name, self.sweep = choose_head(self.device)
        self.rows, self.columns = _tile(self.device)
        self._memory: dict[int, Tensor] = {}

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """Iterate over tiles as pairs: the first token, and the head's rows from there [C, M]."""
        for start in range(0, len(self.head_VM), self.columns):
            yield start, self.head_VM[start : start + self.columns].to(self.product)

    def chunks(self, length: int) -> list[slice]:
        """Slices of at most `rows` rows, equal except the last."""
        if not length:
            return []
        size = -(-length // -(-length // self.rows))
        return [slice(start, start + size) for start in range(0, length, size)]

    def scratch(self, shape: tuple[int, int], number: int) -> Tensor:
        """A tile of memory that calls with the same number share; the first shape must be the largest."""
        if number not in self._memory:
            self._memory[number] = torch.empty(shape[0] * shape[1], dtype=self.dtype, device=self.device)
        return self._memory[number][: shape[0] * shape[1]].view(shape)


@frozen(eq=False)
class Bias:
    """The term that a draft adds to the frozen head's logits of its slots: latent_Wr table_Vr^T, both
    differentiable.
    """

    latent_Wr: Tensor
    table_Vr: Tensor


class HeadSoftmax:
    """The softmax over a chunk of rows, and the head's rows weighted by it, computed tile by tile."""

    def __init__(
        self,
        tiles: Tiles,
        hidden_RM: Tensor,
        labels_R: Tensor | None,
        *,
        hide: bool,
        with_gradient: bool,
        soft_cap: float | None = None,
    ):
        self.tiles, self.soft_cap = tiles, soft_cap
        self.slope_RC: Tensor | None = None  # of the soft cap, in the tile that is taken in next
        self.hidden_RM = hidden_RM.to(tiles.product)
        labels_R = None if labels_R is None else labels_R.to(torch.int64).contiguous()
        self.state = RowState(len(hidden_RM), tiles.dtype, tiles.device, labels_R, hide)
        self.sum_RM = torch.zeros_like(hidden_RM, dtype=tiles.dtype) if with_gradient else None

    def logits(self, head_CM: Tensor, number: int) -> Tensor:
        """The logits of a tile, [R, C], in the scratch memory of that number."""
        out = self.tiles.scratch((len(self.hidden_RM), len(head_CM)), number)
        set_product(out, self.hidden_RM, head_CM)
        if self.soft_cap is not None:
            cap_(out, self.soft_cap)
            self.slope_RC = None if self.sum_RM is None else cap_slope(out, self.soft_cap)
        return out

    def add(self, logits_RC: Tensor, start: int, head_CM: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add a tile to the sums. Returns its exponentials, and the scale for earlier sums, as a Sweep gives them."""
        p_RC, scale_R = self.tiles.sweep(self.state, logits_RC, start, head_CM.dtype)
        if self.sum_RM is not None:
            if scale_R is not None:
                self.sum_RM.mul_(scale_R[:, None])
            of_product_RC = p_RC if self.slope_RC is None else (p_RC * self.slope_RC).to(p_RC.dtype)
            add_product(self.sum_RM, of_product_RC, head_CM)
        return p_RC, scale_R

    @property
    def mean_RM(self) -> Tensor:
        """The mean of the head's rows under the softmax, each row times its soft cap's slope, [R, M].

        It is made in the memory of the sums: read it once.
        """
        assert self.sum_RM is not None
        return self.sum_RM.div_(self.state.total_R.to(self.sum_RM.dtype)[:, None])


def add_gap(
    gap_R: Tensor, draft_RC: Tensor, teacher: HeadSoftmax, teacher_RC: Tensor, start: int, head_CM: Tensor
) -> Tensor:
    """Add a tile to gap_R, the sum of exp(teacher - reference) (teacher - draft), and to the teacher's sums."""
    gap_RC = torch.sub(teacher_RC, draft_RC, out=teacher.tiles.scratch(tuple(draft_RC.shape), 2))
    p_RC, scale_R = teacher.add(teacher_RC, start, head_CM)
    return (gap_R if scale_R is None else gap_R * scale_R) + gap_RC.mul_(p_RC).sum(dim=1)


def cap_(logits: Tensor, soft_cap: float) -> None:
    """Apply a soft cap to logits, in place: cap * tanh(logits / cap)."""
    logits.div_(soft_cap).tanh_().mul_(soft_cap)


def cap_slope(capped: Tensor, soft_cap: float) -> Tensor:
    """The slope of a soft cap at the place where its value is `capped`."""
    return 1 - (capped / soft_cap).square()


def set_product(out: Tensor, hidden_RM: Tensor, head_CM: Tensor) -> None:
    """Write hidden_RM head_CM^T to `out`, in the dtype of `out`; CUDA computes it from narrower factors (out_dtype)."""
    if head_CM.dtype == out.dtype:
        torch.mm(hidden_RM, head_CM.T, out=out)
    else:
        torch.mm(hidden_RM, head_CM.T, out_dtype=out.dtype, out=out)


def add_product(sum_RM: Tensor, p_RC: Tensor, head_CM: Tensor) -> None:
    """Add p_RC head_CM to sum_RM, in place, with the precision of the sum.

    CUDA adds within the product (out_dtype, which other devices lack), without a temporary [R, M].
    """
    if head_CM.dtype == sum_RM.dtype:
        sum_RM.addmm_(p_RC, head_CM)
    elif sum_RM.is_cuda:
        torch.addmm(sum_RM, p_RC, head_CM, out_dtype=sum_RM.dtype, out=sum_RM)
    else:
        sum_RM.addmm_(p_RC.to(sum_RM.dtype), head_CM.to(sum_RM.dtype))
