"""Rolling a target's cache back to the last accepted token.

Attention layers are cropped. Two kinds of layers cannot be: linear attention holds one state for the whole past, and
a sliding window has thrown away what lies before it. What these hold is saved before a verification and put back
after it, and the accepted tokens then run through the target once more.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin


@frozen
class Saved:
    """A cache before a verification: its length, and by layer what cropping would not bring back."""

    length: int
    layers: dict[int, dict[str, Any]]


def save(cache: DynamicCache) -> Saved:
    """To be called behind the prefill, when every layer holds something."""
    return Saved(
        cache.get_seq_length(), {index: kept for index, layer in enumerate(cache.layers) if (kept := _keep(layer))}
    )


def roll_back(cache: DynamicCache, saved: Saved, accepted: int) -> bool:
    """Undo a verification but for its first `accepted` tokens.

    True where these tokens have to run again, because the cache is back at where it was saved.
    """
    for index, layer in enumerate(cache.layers):
        if index in saved.layers:
            _put_back(layer, saved.layers[index])
        else:
            _crop(layer, saved.length + (0 if saved.layers else accepted))
    return bool(saved.layers)


def _crop(layer: Any, length: int) -> None:
    """By the number of tokens to remove, since newer versions of transformers do not take a length."""
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
    """The states of a layer of linear attention; newer versions of transformers number them."""
    kinds = (layer.conv_states, layer.recurrent_states)
    return [state for kind in kinds for state in (kind.values() if isinstance(kind, dict) else [kind])]
