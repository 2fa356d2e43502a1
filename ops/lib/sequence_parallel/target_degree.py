"""Checks of the degree at which ranks share a target's sequences. Torch-free: an op's declaration needs it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dsl.errors import ConfigError
from ops.lib.sequence_parallel.degree import rank_mistakes

SHARED_LAYERS = ("full_attention", "sliding_attention")
# Their angles depend on the longest position of a forward pass, which differs from slice to slice.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_target_degree(config: Mapping[str, Any], *, world_size: int, sp_degree: int) -> None:
    """Raises one ConfigError with everything that forbids the degree; needs no process group.

    config is the target's config.json, or its config's `to_dict`; sizes come from text_config if there
    is one.
    """
    if sp_degree < 1:
        mistakes = [f"sp_degree: must be at least 1, got {sp_degree}"]
    else:
        mistakes = rank_mistakes(world_size, sp_degree)
    if sp_degree > 1:
        text = config.get("text_config") or config
        mistakes += [*_layer_mistakes(text, sp_degree), *_head_mistakes(text, sp_degree), *_rope_mistakes(text)]
    if mistakes:
        raise ConfigError("sequence parallelism of the target:\n" + "\n".join(f"  {mistake}" for mistake in mistakes))


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


def _head_mistakes(text: Mapping[str, Any], sp_degree: int) -> list[str]:
    heads = text["num_attention_heads"]
    kv_heads = text.get("num_key_value_heads") or heads
    exchanged = math.lcm(kv_heads, sp_degree)
    if heads % exchanged == 0:
        return []
    return [
        f"sp_degree: {sp_degree} ranks need {exchanged} key/value heads (lcm of {kv_heads} and {sp_degree}), which do "
        f"not divide the target's {heads} attention heads; {_fitting_degrees(heads, kv_heads)}"
    ]


def _fitting_degrees(heads: int, kv_heads: int) -> str:
    fitting = [str(degree) for degree in range(1, heads + 1) if heads % math.lcm(kv_heads, degree) == 0]
    return f"possible degrees are {', '.join(fitting)}"


def _rope_mistakes(text: Mapping[str, Any]) -> list[str]:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in LENGTH_DEPENDENT_ROPE:
        return []
    return [
        f'sp_degree: the target\'s rope_type "{kind}" makes its angles depend on the longest position of a forward '
        f"pass, which differs from rank to rank; set sp_degree to 1"
    ]
