"""Which context each block sees."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen
from torch import Tensor


@frozen(eq=False)
class ContextRange:
    """Which packed context positions each block sees: [start_n, end_n), int64 CPU tensors [N], blocks in any order.

    Created once for blocks that all layers share; attention caches in it what it derives.
    """

    start_N: Tensor
    end_N: Tensor
    derived: dict[tuple[Any, ...], Any] = field(factory=dict, init=False, repr=False)
