"""Work that keeps a device busy: functions compiled for inputs of many sizes, and copies that nothing waits for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

# torch stops at 8 and then silently runs the function uncompiled. All layers of a draft share one count, and training,
# measuring and decoding need separate graphs.
MOST_GRAPHS = 64

# Options of torch's compiler for GPUs; a version that lacks one does not need it. The compiler fuses a sum over rows
# with one over columns from some number of rows on. Without this option that number is a condition of the graph, and
# a training compiles again whenever a micro-batch is on its other side.
OPTIONS = {"triton.mix_order_reduction_non_strict_mode": True}


def compiled(
    function: Callable[..., Result], *, open_dimension: int = 0, fullgraph: bool = False
) -> Callable[..., Result]:
    """The function compiled with dynamic sizes, for up to MOST_GRAPHS kinds of inputs.

    open_dimension: the dimension of every tensor argument whose size is independent of all others. Otherwise sizes that
    happen to be equal at compilation would count as one, and cost another graph when they differ. Raises torch's
    FailOnRecompileLimitHit for too many graphs.
    """
    known = torch._inductor.list_options()
    options = {name: value for name, value in OPTIONS.items() if name in known}
    inner = torch.compile(function, dynamic=True, fullgraph=fullgraph, options=options)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Result:
        for argument in arguments:
            if isinstance(argument, Tensor):
                leave_open(argument, open_dimension)
        # Around each call, since torch 2.13 keeps its settings by thread.
        with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS, fail_on_recompile_limit_hit=True):
            return inner(*arguments, **named)

    return call


def leave_open(tensor: Tensor, *dimensions: int) -> None:
    """Make torch.compile treat these sizes of a tensor as dynamic and independent."""
    for dimension in dimensions:
        torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor copied to the device; for CUDA through pinned memory, so that the host need not wait.

    torch keeps the pinned memory until the copy is done.
    """
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
