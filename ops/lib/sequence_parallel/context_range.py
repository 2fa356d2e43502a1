"""Which context each block sees."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen
from torch import Tensor


@frozen(eq=False)
class ContextRange:
    """The packed context positions that each block sees: [start_n, end_n), int64 CPU tensors [N], blocks in any order.

    One object serves all layers; attention caches derived data in it.
    """

    start_N: Tensor
    end_N: Tensor
    derived: dict[tuple[Any, ...], Any] = field(factory=dict, init=False, repr=False)
