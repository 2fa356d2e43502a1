"""Checks of the degree of sequence parallelism, of a draft and of a target, and of the exchange's name.

Torch-free: an op's declaration needs it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dsl.errors import ConfigError
from ops.lib.vision.family_config import is_qwen

SHARED_LAYERS = ("full_attention", "sliding_attention")
# Their angles depend on the longest position of a forward pass, which differs from slice to slice.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
EXCHANGES = ("auto", "ulysses", "gather")
_RING = (
    'sp_exchange: "ring" is not available. Its schedule balances queries against keys around the ring, but here the '
    "queries are the blocks and the context has no queries, so it balances nothing; "
    '"gather" and "ulysses" are exact and send less'
)


def known_exchange(_instance: object, _attribute: object, name: str) -> None:
    """A validator of sp_exchange. Raises ValueError."""
    mistakes = _exchange_mistakes(name)
    if mistakes:
        raise ValueError(mistakes[0])


def check_degree(
    *,
    world_size: int,
    sp_degree: int,
    sp_exchange: str,
    query_heads: int,
    kv_heads: int,
    shortest: int,
    pad_multiple: int,
) -> None:
    """Check the sequence-parallel degree of a draft training; needs no process group.

    shortest: length in tokens of the shortest sample. pad_multiple: lengths are padded to a multiple of it. Raises one
    ConfigError with all mistakes.
    """
    mistakes = _rank_mistakes(world_size, sp_degree)
    if sp_degree >= 1:
        mistakes += _length_mistakes(sp_degree, shortest, pad_multiple)
        if sp_exchange == "ulysses":
            mistakes += _head_mistakes(sp_degree, query_heads, kv_heads)
    mistakes += _exchange_mistakes(sp_exchange)
    if mistakes:
        raise ConfigError(*mistakes, head="sequence parallelism")


def check_target_degree(config: Mapping[str, Any], *, world_size: int, sp_degree: int) -> None:
    """Check the sequence-parallel degree of a target; needs no process group.

    config: the target's config.json, or its config's `to_dict`; sizes come from text_config if there is one. Raises one
    ConfigError with all mistakes.
    """
    mistakes = _rank_mistakes(world_size, sp_degree)
    if sp_degree > 1:
        text = config.get("text_config") or config
        mistakes += [*_layer_mistakes(text, sp_degree), *_target_head_mistakes(text, sp_degree), *_rope_mistakes(text)]
        if not is_qwen(config):
            mistakes.append(
                f"sp_degree: the attention of a {config['model_type']} is not that of Qwen's families, which ranks "
                "share; set sp_degree to 1, which still shards the target over all ranks"
            )
    if mistakes:
        raise ConfigError(*mistakes, head="sequence parallelism of the target")


def _rank_mistakes(world_size: int, sp_degree: int) -> list[str]:
    if sp_degree < 1:
        return [f"sp_degree: must be at least 1, got {sp_degree}"]
    if world_size % sp_degree == 0:
        return []
    return [
        f"sp_degree: {world_size} ranks are fewer than the mesh of "
        f"dp {math.ceil(world_size / sp_degree)} x sp {sp_degree}; start a multiple of {sp_degree} ranks, "
        f"or set sp_degree to a divisor of {world_size}"
    ]


def _length_mistakes(sp_degree: int, shortest: int, pad_multiple: int) -> list[str]:
    mistakes = []
    if sp_degree > shortest:
        mistakes.append(
            f"sp_degree: {sp_degree} ranks cannot share the shortest sample, which has {shortest} tokens; "
            f"set sp_degree to at most {shortest}, or drop short samples"
        )
    if pad_multiple % sp_degree:
        mistakes.append(
            f"sp_degree: {sp_degree} does not divide pad_multiple = {pad_multiple}, and every rank gets an equal "
            f"slice; set pad_multiple of shard_sequence to a multiple of {sp_degree}"
        )
    return mistakes


def _head_mistakes(sp_degree: int, query_heads: int, kv_heads: int) -> list[str]:
    exchanged = math.lcm(kv_heads, sp_degree)
    if query_heads % exchanged == 0:
        return []
    return [
        f'sp_exchange: "ulysses" at sp_degree = {sp_degree} needs {exchanged} key/value heads '
        f"(lcm of {kv_heads} and {sp_degree}), which do not divide {query_heads} query heads; "
        'use sp_exchange = "gather", which does not depend on heads'
    ]


def _exchange_mistakes(name: str) -> list[str]:
    if name == "ring":
        return [_RING]
    return [] if name in EXCHANGES else [f'sp_exchange: "{name}" is not one of {", ".join(EXCHANGES)}']


def _layer_mistakes(text: Mapping[str, Any], sp_degree: int) -> list[str]:
    found = set(text.get("layer_types") or ())
    if not found and any(name.startswith("linear_") or name == "full_attention_interval" for name in text):
        found = {"linear_attention"}  # transformers' default for a config without layer_types
    unknown = sorted(found - set(SHARED_LAYERS))
    if not unknown:
        return []
    return [
        f"sp_degree: {sp_degree} ranks cannot share the sequences of this {text.get('model_type', 'model')}: its "
        f"layer_types hold {', '.join(unknown)}, whose state runs along the whole sequence, so that slices would be "
        f"wrong without an error; set sp_degree to 1, which still shards the target over all ranks"
    ]


def _target_head_mistakes(text: Mapping[str, Any], sp_degree: int) -> list[str]:
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or heads
    exchanged = math.lcm(kv_heads, sp_degree)
    if heads % exchanged == 0:
        return []
    fitting = [str(degree) for degree in range(1, heads + 1) if heads % math.lcm(kv_heads, degree) == 0]
    return [
        f"sp_degree: {sp_degree} ranks need {exchanged} key/value heads (lcm of {kv_heads} and {sp_degree}), which do "
        f"not divide the target's {heads} attention heads; possible degrees are {', '.join(fitting)}"
    ]


def _rope_mistakes(text: Mapping[str, Any]) -> list[str]:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in LENGTH_DEPENDENT_ROPE:
        return []
    return [
        f'sp_degree: the target\'s rope_type "{kind}" makes its angles depend on the longest position of a forward '
        f"pass, which differs from rank to rank; set sp_degree to 1"
    ]
