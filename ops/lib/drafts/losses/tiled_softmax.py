"""One sweep over a tile of logits: exponentials against a running reference, their sums, and how the labels stand.

`torch_sweep` defines what the compiled ones do: `fusible_sweep` for torch.compile, and the C function of
`ops.lib.kernels.c_library`.

Legend: R rows of a tile, C its columns (consecutive tokens), L rows whose label is one of these tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ops.lib.kernels.c_library import compiled_sweep
from ops.lib.kernels.device import compiled

SLACK = 8.0  # how far logits may pass the reference: exp(8) times their number is far from overflow, float16 included
FEW_THREADS = 2  # with more threads torch's sweep, which uses them all, is faster than the C function


class RowState:
    """The state of a softmax over a chunk of rows, after the tiles processed so far.

    reference_R: subtracted from logits before exp. best_R: the maximum (without the labels' logits if `hide`). total_R
    (float64): sum exp(logit - reference). logit_R: the label's logit. ahead_R: whether it is larger than all earlier
    logits, and not smaller than later ones in its own tile; both are set by the label's tile. hide: leave the labels'
    logits out of sums and maxima. labels_R: None to watch none.
    """

    def __init__(self, length: int, dtype: torch.dtype, device: torch.device, labels_R: Tensor | None, hide: bool):
        self.labels_R = labels_R
        self.hide = hide
        self.reference_R = torch.full((length,), -torch.inf, dtype=dtype, device=device)
        self.best_R = self.reference_R.clone()
        self.total_R = torch.zeros(length, dtype=torch.float64, device=device)
        self.logit_R = torch.full((length,), torch.nan, dtype=dtype, device=device)
        self.ahead_R = torch.zeros(length, dtype=torch.bool, device=device)

    @property
    def log_total_R(self) -> Tensor:
        """The log of the sum of exp(logit), float64."""
        return self.total_R.log() + self.reference_R

    @property
    def correct_R(self) -> Tensor:
        """Whether the label is the first best token, after the last tile."""
        return self.ahead_R & (self.logit_R >= self.best_R)


# (state, logits_RC, the first column's token, dtype) -> exponentials_RC of that dtype (in the logits' memory where it
# can be), and the factor for earlier sums, [R], or None if it is 1 for every row.
Sweep = Callable[[RowState, Tensor, int, torch.dtype], tuple[Tensor, Tensor | None]]


def choose_sweep(device: torch.device) -> tuple[str, Sweep]:
    """The fastest sweep on this device, and its name: compiled by torch, the C function, or torch."""
    if device.type == "cuda":
        return "compiled by torch", functools.partial(fusible_sweep, _compiled())
    if device.type != "cpu" or torch.get_num_threads() > FEW_THREADS:
        return "torch", torch_sweep
    name, function = compiled_sweep()
    if function is None:
        return f"torch ({name})", torch_sweep
    return f"C ({name})", functools.partial(kernel_sweep, function)


def torch_sweep(state: RowState, logits_RC: Tensor, start: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Process a tile in plain torch: for any device and dtype."""
    if state.labels_R is not None:
        _look(state, state.labels_R, logits_RC, start)
    top_R = logits_RC.amax(dim=1)
    state.best_R = torch.maximum(state.best_R, top_R)
    reference_R = torch.where(top_R > state.reference_R + SLACK, top_R, state.reference_R)
    scale_R = (state.reference_R - reference_R).exp_()
    state.reference_R = reference_R
    p_RC = logits_RC.sub_(reference_R[:, None]).exp_()
    state.total_R = state.total_R * scale_R + p_RC.sum(dim=1)
    return p_RC.to(dtype), None if bool((scale_R == 1).all()) else scale_R


def _look(state: RowState, labels_R: Tensor, logits_RC: Tensor, start: int) -> None:
    """Record the logits of labels inside the tile, and remove them from it if they are to be hidden."""
    column_R = labels_R - start
    rows_L = ((column_R >= 0) & (column_R < logits_RC.shape[1])).nonzero()[:, 0]
    column_L, logits_LC = column_R[rows_L], logits_RC[rows_L]
    logit_L = logits_LC.gather(1, column_L[:, None])[:, 0]
    state.logit_R[rows_L] = logit_L
    state.ahead_R[rows_L] = (logits_LC.argmax(dim=1) == column_L) & (logit_L > state.best_R[rows_L])
    if state.hide:
        logits_RC[rows_L, column_L] = -torch.inf


def fusible_sweep(
    compute: Callable[..., tuple[Tensor, ...]], state: RowState, logits_RC: Tensor, start: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Process a tile by `compute`: `sweep_values` or its compiled form. It never waits for the device."""
    before = (state.reference_R, state.best_R, state.total_R, state.logit_R, state.ahead_R)
    column_R = None if state.labels_R is None else state.labels_R - start
    p_RC, scale_R, *after = compute(logits_RC, column_R, state.hide, dtype, *before)
    state.reference_R, state.best_R, state.total_R, state.logit_R, state.ahead_R = after
    return p_RC, scale_R


def sweep_values(
    logits_RC: Tensor,
    column_R: Tensor | None,
    hide: bool,
    dtype: torch.dtype,
    reference_R: Tensor,
    best_R: Tensor,
    total_R: Tensor,
    logit_R: Tensor,
    ahead_R: Tensor,
) -> tuple[Tensor, ...]:
    """The exponentials, the scale, and the new tensors of the state; no argument is changed, and no value is read.

    column_R: the label's column in the tile, outside of its range if the label lies in another tile.
    """
    if column_R is not None:
        inside_R = (column_R >= 0) & (column_R < logits_RC.shape[1])
        within_R = column_R.clamp(0, logits_RC.shape[1] - 1)
        own_R = logits_RC.gather(1, within_R[:, None])[:, 0]
        first_R = (logits_RC.argmax(dim=1) == within_R) & (own_R > best_R)
        logit_R = torch.where(inside_R, own_R, logit_R)
        ahead_R = torch.where(inside_R, first_R, ahead_R)
        if hide:
            columns_C = torch.arange(logits_RC.shape[1], device=logits_RC.device)
            logits_RC = torch.where(columns_C == column_R[:, None], -torch.inf, logits_RC)
    top_R = logits_RC.amax(dim=1)
    raised_R = torch.where(top_R > reference_R + SLACK, top_R, reference_R)
    scale_R = (reference_R - raised_R).exp()
    p_RC = (logits_RC - raised_R[:, None]).exp()
    total_R = total_R * scale_R + p_RC.sum(dim=1)
    return p_RC.to(dtype), scale_R, raised_R, torch.maximum(best_R, top_R), total_R, logit_R, ahead_R


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, ...]]:
    return compiled(sweep_values, fullgraph=True)


def kernel_sweep(
    function: Callable[..., int], state: RowState, logits_RC: Tensor, start: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Process a tile by the C function, in place; float64 is done by torch."""
    if logits_RC.dtype != torch.float32:
        return torch_sweep(state, logits_RC, start, dtype)
    scale_R = torch.empty_like(state.reference_R)
    rows, columns = logits_RC.shape
    raised = function(
        logits_RC.data_ptr(),
        rows,
        columns,
        start,
        SLACK,
        state.reference_R.data_ptr(),
        state.best_R.data_ptr(),
        state.total_R.data_ptr(),
        scale_R.data_ptr(),
        None if state.labels_R is None else state.labels_R.data_ptr(),
        state.hide,
        state.logit_R.data_ptr(),
        state.ahead_R.data_ptr(),
    )
    return logits_RC, scale_R if raised else None
