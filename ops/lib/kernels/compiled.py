"""torch.compile for functions whose inputs come in many sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

# torch stops at 8 and then runs the function uncompiled without a word. All layers of a draft share one count, and
# training, measuring and decoding need graphs of their own.
MOST_GRAPHS = 64


def compiled(
    function: Callable[..., Result], *, open_dimension: int = 0, fullgraph: bool = False
) -> Callable[..., Result]:
    """The function compiled with sizes left open, for up to MOST_GRAPHS kinds of inputs.

    open_dimension: of every tensor argument, has nothing to do with any other size. Sizes that are equal by chance when
    the function is compiled would else be taken for the same number, and cost a graph when they differ. Raises torch's
    FailOnRecompileLimitHit where there are too many graphs.
    """
    inner = torch.compile(function, dynamic=True, fullgraph=fullgraph)

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
    """Have these sizes of a tensor taken for no other size, and for no constant, where it is given to a compilation."""
    for dimension in dimensions:
        torch._dynamo.maybe_mark_dynamic(tensor, dimension)
