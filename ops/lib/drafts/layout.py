"""Who predicts what in a block: which slots are asked, and how far behind the anchor the token of each of them lies."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Layout:
    """The layout of a block of `queries` slots: slot q predicts the token at anchor + q + shift, if q >= first.

    A block's tokens have numbers 0 to block_size - 1, the anchor 0; proposals are 1 to block_size - 1 in every layout.
    """

    queries: int
    first: int
    shift: int

    @property
    def proposals(self) -> int:
        return self.queries - self.first


def masks_first(block_size: int) -> Layout:
    """The layout of plain DFlash: slot 0 is the anchor's, and each later slot predicts the token at its own
    position.
    """
    return Layout(queries=block_size, first=1, shift=0)


def anchor_first(block_size: int) -> Layout:
    """The layout in which slot 0 predicts too: each slot predicts the token after its position, with one slot fewer."""
    return Layout(queries=block_size - 1, first=0, shift=1)
