"""The target's side of speculative decoding: it runs over a block, and keeps what was accepted of it.

`BatchVerifier` takes rows that accept different numbers of tokens. `SingleVerifier` takes one row, over a cache that is
rolled back, a block or a token at a time. `ops/lib/target/cache_trial.py` finds out which of these a target needs.

    B batch, K block size, V vocabulary, F captured feature width
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Protocol

import torch
from attrs import define, field
from torch import Tensor
from transformers import Cache, DynamicCache

from ops.lib.target.cache import (
    Rows,
    Saved,
    attention_of,
    block_masks,
    decoder_config,
    roll_back,
    row_cache,
    save,
    windows_of,
)
from ops.lib.target.model import Target
from ops.lib.target.prefill import Prefill


class Verification(Enum):
    """How a target verifies a block; each way is slower than the one before it, and right for more targets."""

    BATCH = "the blocks of a batch at once"
    BLOCK = "a block at once, one prompt at a time"
    TOKEN = "token by token, one prompt at a time"


class Captured(Protocol):
    """What a context records of the target's passes for a draft."""

    def features(self) -> Tensor:
        """The features of the last pass, [B, K, F]."""


@define(eq=False)
class BatchVerifier:
    """Verifier of a batch's blocks.

    offset_B: how far a row's positions lie from the count of its tokens. windows: as of `windows_of`.
    """

    target: Target
    captured: Captured
    cache: Cache
    rows: Rows
    offset_B: Tensor
    windows: Mapping[str, int | None]

    def verify(self, block_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, K, V] after each token of the blocks that follow the rows, and the tokens' features [B, K, F]."""
        logits_BKV = self.target.model(
            input_ids=block_BK,
            attention_mask=block_masks(self.rows, block_BK.shape[1], self.windows, self._added),
            position_ids=_positions(self.rows, block_BK, self.offset_B),
            past_key_values=self.cache,
            use_cache=True,
        ).logits
        return logits_BKV, self.captured.features()

    def settle(self, block_BK: Tensor, kept_B: Tensor) -> None:
        """Keep the first tokens of each block: nothing to do before the rows advance."""

    def select(self, places: Tensor) -> None:
        """Continue with only these rows."""
        self.cache.reorder_cache(places)
        self.offset_B = self.offset_B[places]

    @property
    def _added(self) -> torch.dtype | None:
        """The dtype of an additive mask, which transformers' "eager" attention adds to the scores; None for a bool
        mask.
        """
        return self.target.model.dtype if attention_of(self.target) == "eager" else None


@define(eq=False)
class SingleVerifier:
    """Verifier of a batch of one, over a cache that is rolled back.

    at_once: tokens that run through the target together; default: the whole block.
    """

    target: Target
    captured: Captured
    cache: DynamicCache
    rows: Rows
    offset_B: Tensor
    at_once: int | None = None
    _before: list[Saved] = field(factory=list, init=False)  # before each pass of the last block

    def verify(self, block_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [1, K, V] after each token of the prompt's next block, and the tokens' features [1, K, F]."""
        self._before.clear()
        found = []
        for start in range(0, block_BK.shape[1], self._step(block_BK)):
            self._before.append(save(self.cache))
            logits = self._run(block_BK, start, start + self._step(block_BK))
            found.append((logits, self.captured.features()))
        if len(found) == 1:
            return found[0]
        logits_BKV, features_BKF = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        return logits_BKV, features_BKF

    def settle(self, block_BK: Tensor, kept_B: Tensor) -> None:
        """Keep the first tokens of the block; what the cache does not hold of them then runs again."""
        kept = int(kept_B[0])
        if kept >= block_BK.shape[1]:
            return
        whole_passes, rest = divmod(kept, self._step(block_BK))
        if roll_back(self.cache, self._before[whole_passes], rest) and rest:
            self._run(block_BK, kept - rest, kept)

    def select(self, places: Tensor) -> None:
        """A batch of one loses no row before it ends."""

    def _step(self, block_BK: Tensor) -> int:
        return self.at_once or block_BK.shape[1]

    def _run(self, block_BK: Tensor, start: int, end: int) -> Tensor:
        return self.target.model(
            input_ids=block_BK[:, start:end],
            position_ids=_positions(self.rows, block_BK, self.offset_B)[:, start:end],
            past_key_values=self.cache,
            use_cache=True,
        ).logits


def verifier_of(
    way: Verification, target: Target, captured: Captured, begun: Prefill, rows: Rows, room: int
) -> BatchVerifier | SingleVerifier:
    """The verifier behind a prefill into a `whole_cache`, with room for as many columns. It takes over the cache.

    captured: the features that the target's passes record.
    """
    if way is Verification.BATCH:
        windows = windows_of(decoder_config(target))
        assert windows is not None  # or the way would be another
        return BatchVerifier(target, captured, row_cache(begun.cache, room, rows), rows, begun.offset_B, windows)
    at_once = 1 if way is Verification.TOKEN else None
    return SingleVerifier(target, captured, begun.cache, rows, begun.offset_B, at_once)


def _positions(rows: Rows, block_BK: Tensor, offset_B: Tensor) -> Tensor:
    """int64 [B, K]; behind a prompt the three dimensions of a Qwen-VL position are alike."""
    return rows.next(block_BK.shape[1]) - rows.start_B[:, None] + offset_B[:, None]
