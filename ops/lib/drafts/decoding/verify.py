"""The target's side of speculative decoding: it runs over a block, and keeps what was accepted of it.

`BatchVerifier` takes rows that accept different numbers of tokens. A target with layers that cannot leave columns out
(linear attention, sliding windows) has its rows decoded one by one, by `SingleVerifier`.

    B batch, K block size, V vocabulary
"""

from __future__ import annotations

from attrs import define, field
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from ops.lib.drafts.decoding.cache import Rows, Saved, causal_mask, roll_back, row_cache, save
from ops.lib.target.model import Target


@define(eq=False)
class BatchVerifier:
    """Verifies blocks of a batch. offset_B: the difference between a row's positions and its number of tokens."""

    target: Target
    cache: Cache
    rows: Rows
    offset_B: Tensor

    @classmethod
    def of(cls, target: Target, cache: Cache, rows: Rows, offset_B: Tensor, room: int) -> BatchVerifier:
        """Create the verifier over a prefill's cache, with room for `room` columns."""
        return cls(target, row_cache(cache, room, rows), rows, offset_B)

    def verify(self, block_BK: Tensor) -> Tensor:
        """The target's logits [B, K, V] after each token of the blocks that follow the rows."""
        return self.target.model(
            input_ids=block_BK,
            attention_mask=causal_mask(self.rows, block_BK.shape[1]),
            position_ids=_positions(self.rows, block_BK, self.offset_B),
            past_key_values=self.cache,
            use_cache=True,
        ).logits

    def settle(self, block_BK: Tensor, kept_B: Tensor) -> None:
        """Do nothing: kept tokens stay in the cache, and the rows' ends advance elsewhere."""

    def select(self, places: Tensor) -> None:
        """Drop all rows except these, which are kept in this order."""
        self.cache.reorder_cache(places)
        self.offset_B = self.offset_B[places]


@define(eq=False)
class SingleVerifier:
    """The verifier for a batch of one prompt, whose cache is rolled back after each step."""

    target: Target
    cache: DynamicCache
    rows: Rows
    offset_B: Tensor
    _before: Saved | None = field(default=None, init=False)

    def verify(self, block_BK: Tensor) -> Tensor:
        self._before = save(self.cache)
        return self._run(block_BK)

    def settle(self, block_BK: Tensor, kept_B: Tensor) -> None:
        kept = int(kept_B[0])
        if kept >= block_BK.shape[1]:
            return
        assert self._before is not None  # verify has run
        if roll_back(self.cache, self._before, kept):
            self._run(block_BK[:, :kept])

    def select(self, places: Tensor) -> None:
        """Do nothing: a batch of one keeps its row until it ends."""

    def _run(self, block_BK: Tensor) -> Tensor:
        return self.target.model(
            input_ids=block_BK,
            position_ids=_positions(self.rows, block_BK, self.offset_B),
            past_key_values=self.cache,
            use_cache=True,
        ).logits


def keeps_all_columns(cache: Cache) -> bool:
    """Whether every layer of a cache holds a key and a value for every token."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def _positions(rows: Rows, block_BK: Tensor, offset_B: Tensor) -> Tensor:
    """The positions of a block's tokens, int64 [B, K]; after a prompt the three Qwen-VL dimensions are equal."""
    return rows.next(block_BK.shape[1]) - rows.start_B[:, None] + offset_B[:, None]
