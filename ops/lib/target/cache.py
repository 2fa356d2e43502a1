"""What a target's cache keeps when a block is accepted in part.

`whole_cache` keeps a key and a value for every token in all layers of attention. A layer with a sliding window keeps
them too, and the window is a matter of its mask: what lies before it would be lost otherwise, and could not be brought
back where a block is refused.

`Rows`, for a batch whose rows grow by different numbers of tokens: a row's tokens lie side by side in the columns
[start, end) of a buffer. What a forward pass adds is written behind a row's own end, and `end` moves over the tokens
that are kept: nothing is cropped, since the next pass writes over what was refused.

`save` and `roll_back`, for one row of any target. Attention layers are cropped. Other layers, such as linear attention
with one state for the whole past, are copied before a verification and put back after it, and the accepted tokens then
run through the target once more.

    B batch, T columns, W columns in use, K new columns, G key/value heads, D head size
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from attrs import define, frozen
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ops.lib.target.model import Target


def own_cache(target: Target) -> DynamicCache:
    """The empty cache that transformers itself gives a target; layers with a window keep that window only."""
    return DynamicCache(config=decoder_config(target))


def whole_cache(target: Target) -> DynamicCache:
    """An empty cache in which every layer of attention keeps all tokens."""
    cache = own_cache(target)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = DynamicLayer()
    return cache


def keeps_all_columns(cache: Cache) -> bool:
    """Whether every layer holds a key and a value for every token, also those that are only made when they are used."""
    return all(type(layer) is DynamicLayer for layer in cache.layers or [cache.layer_class_to_replicate()])


def decoder_config(target: Target) -> PretrainedConfig:
    """The part of the loaded model's config that describes the decoder."""
    return target.model.config.get_text_config(decoder=True)


def attention_of(target: Target) -> str:
    """The name of transformers' function of attention that the target computes with."""
    return str(decoder_config(target)._attn_implementation)


def windows_of(config: PretrainedConfig) -> dict[str, int | None] | None:
    """The window of each kind of layer, by its name in `layer_types`, None where a kind sees the whole past.

    None if there is a kind of layer whose mask is another one.
    """
    window = getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"
    kinds = set(getattr(config, "layer_types", None) or [default])
    if getattr(config, "attention_chunk_size", None) is not None or kinds - {"full_attention", "sliding_attention"}:
        return None
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


@define(eq=False)
class Rows:
    """Which columns hold each row's tokens: [start_B, end_B), int64. longest: the last end, known to the host."""

    start_B: Tensor
    end_B: Tensor
    longest: int

    @classmethod
    def of(cls, mask_BS: Tensor) -> Rows:
        """The rows of prompts that were padded on the left; mask_BS: 1 where there is a token."""
        longest = mask_BS.shape[1]
        count_B = mask_BS.sum(1)
        return cls(longest - count_B, torch.full_like(count_B, longest), longest)

    @property
    def length_B(self) -> Tensor:
        """Tokens of each row."""
        return self.end_B - self.start_B

    def next(self, count: int) -> Tensor:
        """The columns of the next tokens, int64 [B, count]."""
        return self.end_B[:, None] + torch.arange(count, device=self.end_B.device)

    def advance(self, kept_B: Tensor) -> None:
        """Keep so many of the tokens behind each end."""
        self.end_B = self.end_B + kept_B
        self.longest = int(self.end_B.max())

    def select(self, places: Tensor) -> None:
        """Continue with only these rows."""
        self.start_B, self.end_B = self.start_B[places], self.end_B[places]
        self.longest = int(self.end_B.max())


class RowLayer(DynamicLayer):
    """One layer of a `RowCache`."""

    def __init__(self, filled: DynamicLayer, room: int, rows: Rows) -> None:
        super().__init__()
        self.lazy_initialization(filled.keys, filled.values)
        self.keys, self.values = with_room(filled.keys, room), with_room(filled.values, room)
        self.rows = rows

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write behind each row's end, [B, G, K, D]; returns what is in use, [B, G, W, D]."""
        count = key_states.shape[-2]
        columns_BK, width = self.rows.next(count), self.rows.longest + count
        write(self.keys, key_states, columns_BK)
        write(self.values, value_states, columns_BK)
        return self.keys[:, :, :width], self.values[:, :, :width]


def row_cache(filled: Cache, room: int, rows: Rows) -> Cache:
    """The cache of a prefill, with `room` more columns behind it."""
    for index, layer in enumerate(filled.layers):
        filled.layers[index] = RowLayer(layer, room, rows)  # one by one: the old layer's memory is free for the next
    return filled


def causal_mask(rows: Rows, count: int, window: int | None = None) -> Tensor:
    """bool [B, 1, K, W]: which columns the next `count` tokens of each row see; each sees itself at least.

    window: how many columns that are, the token's own included; default: all before it.
    """
    column_W = torch.arange(rows.longest + count, device=rows.end_B.device)
    last_BK1 = rows.next(count)[..., None]
    seen_BKW = (column_W >= rows.start_B[:, None, None]) & (column_W <= last_BK1)
    if window is not None:
        seen_BKW &= column_W > last_BK1 - window
    return seen_BKW[:, None]


def block_masks(
    rows: Rows, count: int, windows: Mapping[str, int | None], added: torch.dtype | None
) -> Tensor | dict[str, Tensor]:
    """What the next `count` tokens of each row see, as a model's `attention_mask`.

    One mask [B, 1, K, W] if the layers are of one kind, otherwise one by kind. added: the dtype of masks that are added
    to the scores, 0 where a column is seen; default: bool masks.
    """
    masks = {}
    for kind, window in windows.items():
        mask = causal_mask(rows, count, window)
        masks[kind] = mask if added is None else added_mask(mask, added)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def added_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask in the form that is added to scores: 0 where a column is seen, else the dtype's lowest number."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def with_room(tensor_BGTD: Tensor, room: int) -> Tensor:
    """Keys or values with `room` columns of zeros behind."""
    return F.pad(tensor_BGTD, (0, 0, 0, room))


def write(buffer_BGTD: Tensor, new_BGKD: Tensor, columns_BK: Tensor) -> None:
    """Put new columns into each row, in place."""
    row_B1 = torch.arange(len(columns_BK), device=columns_BK.device)[:, None]
    buffer_BGTD[row_B1, :, columns_BK] = new_BGKD.transpose(1, 2)


@frozen
class Saved:
    """A cache before a verification: its length, and by layer what cropping would not bring back."""

    length: int
    layers: dict[int, dict[str, Any]]


def save(cache: DynamicCache) -> Saved:
    """Saves what `roll_back` needs of a cache. To be called behind the prefill, when every layer holds something."""
    others = {index: layer for index, layer in enumerate(cache.layers) if type(layer) is not DynamicLayer}
    return Saved(cache.get_seq_length(), {index: _copied(vars(layer)) for index, layer in others.items()})


def roll_back(cache: DynamicCache, saved: Saved, accepted: int) -> bool:
    """Undo a verification but for its first `accepted` tokens. What was saved can be put back once.

    True where these tokens have to run again, because the cache is back at where it was saved.
    """
    for index, layer in enumerate(cache.layers):
        if index in saved.layers:
            vars(layer).update(saved.layers[index])
        else:
            _crop(layer, saved.length + (0 if saved.layers else accepted))
    return bool(saved.layers)


def _crop(layer: Any, length: int) -> None:
    """Crops a layer to a length. It passes the number of tokens to remove, since newer versions of transformers do not
    take a length.
    """
    removed = layer.get_seq_length() - length
    if removed > 0:
        layer.crop(-removed)


def _copied(value: Any) -> Any:
    """A copy of a layer's attributes; its tensors may be written in place, and versions differ in what holds them."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(part) for part in value)
    return value
