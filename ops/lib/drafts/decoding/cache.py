"""What a target's cache keeps when a block is accepted in part.

`Rows`, for a batch whose rows grow by different numbers of tokens: a row's tokens lie side by side in the columns
[start, end) of a buffer. What a forward pass adds is written behind a row's own end, and `end` moves over the tokens
that are kept: nothing is cropped, since the next pass writes over what was refused.

`save` and `roll_back`, for one row whose target has layers that cannot leave columns out. Attention layers are cropped.
Linear attention holds one state for the whole past, and a sliding window has thrown away what lies before it: what
these hold is saved before a verification and put back after it, and the accepted tokens then run through the target
once more.

    B batch, T columns, W columns in use, K new columns, G key/value heads, D head size
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from attrs import define, frozen
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin


@define(eq=False)
class Rows:
    """The columns of a cache that hold each row's tokens: [start_B, end_B), int64. longest: the largest
    end, as an int.
    """

    start_B: Tensor
    end_B: Tensor
    longest: int

    @property
    def length_B(self) -> Tensor:
        """The number of tokens of each row."""
        return self.end_B - self.start_B

    def next(self, count: int) -> Tensor:
        """The columns for the next tokens of each row, int64 [B, count]."""
        return self.end_B[:, None] + torch.arange(count, device=self.end_B.device)

    def advance(self, kept_B: Tensor) -> None:
        """Move each row's end behind the tokens to keep. kept_B: their number."""
        self.end_B = self.end_B + kept_B
        self.longest = int(self.end_B.max())

    def select(self, places: Tensor) -> None:
        """Drop all rows except these, which are kept in this order."""
        self.start_B, self.end_B = self.start_B[places], self.end_B[places]
        self.longest = int(self.end_B.max())


class RowLayer(DynamicLayer):
    """One layer of a `RowCache`: keys and values with room for more tokens."""

    def __init__(self, filled: DynamicLayer, room: int, rows: Rows) -> None:
        super().__init__()
        self.lazy_initialization(filled.keys, filled.values)
        self.keys, self.values = with_room(filled.keys, room), with_room(filled.values, room)
        self.rows = rows

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values after each row's end, [B, G, K, D]; returns those in use, [B, G, W, D]."""
        count = key_states.shape[-2]
        columns_BK, width = self.rows.next(count), self.rows.longest + count
        write(self.keys, key_states, columns_BK)
        write(self.values, value_states, columns_BK)
        return self.keys[:, :, :width], self.values[:, :, :width]


def row_cache(filled: Cache, room: int, rows: Rows) -> Cache:
    """The cache of a prefill as a row cache, with room for `room` more columns."""
    for index, layer in enumerate(filled.layers):
        filled.layers[index] = RowLayer(layer, room, rows)  # one by one: the old layer's memory is free for the next
    return filled


def causal_mask(rows: Rows, count: int) -> Tensor:
    """The mask for the next `count` tokens of each row: the columns that each sees, itself included; bool
    [B, 1, K, W].
    """
    column_W = torch.arange(rows.longest + count, device=rows.end_B.device)
    from_start_B1W = column_W >= rows.start_B[:, None, None]
    return (from_start_B1W & (column_W <= rows.next(count)[..., None]))[:, None]


def with_room(tensor_BGTD: Tensor, room: int) -> Tensor:
    """Keys or values extended by `room` columns of zeros."""
    return F.pad(tensor_BGTD, (0, 0, 0, room))


def write(buffer_BGTD: Tensor, new_BGKD: Tensor, columns_BK: Tensor) -> None:
    """Write new columns into each row of a buffer, in place."""
    row_B1 = torch.arange(len(columns_BK), device=columns_BK.device)[:, None]
    buffer_BGTD[row_B1, :, columns_BK] = new_BGKD.transpose(1, 2)


@frozen
class Saved:
    """The state of a cache before a verification: its length, and by layer the states that cropping cannot restore."""

    length: int
    layers: dict[int, dict[str, Any]]


def save(cache: DynamicCache) -> Saved:
    """Save the state of a cache for `roll_back`. Call it after the prefill, when every layer holds something."""
    return Saved(
        cache.get_seq_length(), {index: kept for index, layer in enumerate(cache.layers) if (kept := _keep(layer))}
    )


def roll_back(cache: DynamicCache, saved: Saved, accepted: int) -> bool:
    """Remove the tokens of a verification from a cache, except its first `accepted` ones.

    Returns True where the cache went back to the saved state, so that the accepted tokens must run again.
    """
    for index, layer in enumerate(cache.layers):
        if index in saved.layers:
            _put_back(layer, saved.layers[index])
        else:
            _crop(layer, saved.length + (0 if saved.layers else accepted))
    return bool(saved.layers)


def _crop(layer: Any, length: int) -> None:
    """Crop a cache layer to a length.

    It passes transformers the number of tokens to remove, since newer versions take no length.
    """
    removed = layer.get_seq_length() - length
    if removed > 0:
        layer.crop(-removed)


def _keep(layer: Any) -> dict[str, Any]:
    if isinstance(layer, LinearAttentionCacheLayerMixin):  # written in place
        return {"states": [state.clone() for state in _states(layer)]}
    if isinstance(layer, DynamicSlidingWindowLayer):  # replaced by new tensors
        return {"keys": layer.keys, "values": layer.values, "cumulative_length": layer.cumulative_length}
    return {}


def _put_back(layer: Any, kept: dict[str, Any]) -> None:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for state, value in zip(_states(layer), kept["states"], strict=True):
            state.copy_(value)
        return
    for name, value in kept.items():
        setattr(layer, name, value)


def _states(layer: LinearAttentionCacheLayerMixin) -> list[Tensor]:
    """The states of a linear attention layer in a list; newer versions of transformers number them."""
    kinds = (layer.conv_states, layer.recurrent_states)
    return [state for kind in kinds for state in (kind.values() if isinstance(kind, dict) else [kind])]
