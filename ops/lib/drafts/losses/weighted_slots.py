"""The slots of a micro-batch that have a weight, as the host lists them before the device computes.

Legend: N blocks, K block size, W weighted slots.
"""

from __future__ import annotations

from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class Weighted:
    """rows_W: n * K + k of each weighted slot, int64, ascending; a step needs them on the device that computes.

    before: of how many blocks n -> the weighted slots of the first n blocks, for n = 0..N. least, most: the smallest
    and the largest label of any slot.
    """

    rows_W: Tensor
    before: tuple[int, ...]
    least: int
    most: int

    @classmethod
    def of(cls, labels_NK: Tensor, weights_NK: Tensor) -> Weighted:
        """From labels and weights of N >= 1 blocks, whose device the rows are on; waits for one other than the CPU."""
        weighted_NK = weights_NK > 0
        rows_W = weighted_NK.flatten().nonzero().squeeze(1)
        before = (0, *weighted_NK.sum(dim=1).cumsum(0).tolist())
        least, most = (int(bound) for bound in labels_NK.aminmax())
        return cls(rows_W, before, least, most)

    def rows(self, start: int, end: int) -> Tensor:
        """Those of the blocks [start, end)."""
        return self.rows_W[self.before[start] : self.before[end]]

    def check(self, vocabulary: int) -> None:
        """Raise IndexError for labels that are no token."""
        if self.least < 0 or self.most >= vocabulary:
            raise IndexError(f"labels from {self.least} to {self.most} do not fit a vocabulary of {vocabulary}")
