"""torch.compile for functions whose inputs come in many sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")

# torch stops at 8 and then runs the function uncompiled without a word. All layers of a draft share one count, and
# training, measuring and decoding need graphs of their own.
MOST_GRAPHS = 64


def compiled(function: Callable[..., Result], *, fullgraph: bool = False) -> Callable[..., Result]:
    """The function compiled with sizes left open, for up to MOST_GRAPHS kinds of inputs.

    Raises torch's FailOnRecompileLimitHit where there are more. The limit is set around each call, since torch 2.13
    keeps its settings by thread.
    """
    inner = torch.compile(function, dynamic=True, fullgraph=fullgraph)

    @functools.wraps(function)
    def call(*arguments: object, **named: object) -> Result:
        with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS, fail_on_recompile_limit_hit=True):
            return inner(*arguments, **named)

    return call
