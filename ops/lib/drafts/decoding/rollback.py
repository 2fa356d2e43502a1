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
    if not saved.layers:
        cache.crop(saved.length + accepted)
        return False
    for index, layer in enumerate(cache.layers):
        if index in saved.layers:
            _put_back(layer, saved.layers[index])
        else:
            layer.crop(saved.length)
    return True


def _keep(layer: Any) -> dict[str, Any]:
    if isinstance(layer, LinearAttentionCacheLayerMixin):  # written in place
        return {"conv_states": layer.conv_states.clone(), "recurrent_states": layer.recurrent_states.clone()}
    if isinstance(layer, DynamicSlidingWindowLayer):  # replaced by new tensors
        return {"keys": layer.keys, "values": layer.values, "cumulative_length": layer.cumulative_length}
    return {}


def _put_back(layer: Any, kept: dict[str, Any]) -> None:
    for name, value in kept.items():
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            state: Tensor = getattr(layer, name)
            state.copy_(value)
        else:
            setattr(layer, name, value)
