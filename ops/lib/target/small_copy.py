"""A small model of a target's config with random weights: every kind of layer, narrow, with few experts and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from dsl.errors import DataError
from ops.lib.target.model import Target, chosen_attention
from ops.lib.target.no_memory import lacks_memory
from ops.lib.target.sizes import ORIGINAL, ropes_of
from ops.lib.vision.families import family_of
from ops.lib.vision.family_config import text_part, with_defaults

HEAD = 16
VOCABULARY = 256
# What sizes become, by the name of the field, where the config has one.
OF_SIZE: Mapping[int, tuple[str, ...]] = {
    1: (
        *("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
        *("mamba_n_groups", "mamba_ngroups", "n_groups"),
    ),
    2: ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "linear_num_key_heads", "mamba_expand"),
    4: (
        *("num_attention_heads", "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
        *("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "mamba_dt_rank"),
    ),
    8: ("sliding_window", "attention_chunk_size", "attention_window_size", "hidden_size_per_layer_input", "num_heads"),
    HEAD: (
        *("head_dim", "query_pre_attn_scalar", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        *("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "ssm_state_size", "mamba_chunk_size"),
        *("chunk_size", "rotary_dim"),
    ),
    24: ("q_lora_rank",),
    32: (
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "mamba_d_head",
        "mamba_head_dim",
        "global_head_dim",
        "attention_head_dim",
    ),
    40: ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    64: ("hidden_size", "embedding_dim", "word_embed_proj_dim", "conv_dim", "conv_dim_out", "lru_width"),
    96: ("intermediate_size", "ffn_dim", "block_ff_dim"),
    128: ("mamba_d_ssm", "attention_hidden_size"),
    VOCABULARY: ("vocab_size", "vocab_size_per_layer_input"),
}
SMALL = {name: size for size, names in OF_SIZE.items() for name in names}
COMPUTED = ("qk_head_dim", "mamba_headdim")  # by the class from the others
ENDS = "word_embed_proj_dim"  # of OPT: of its embedding and head, where it is not that of its states
# Numbers that JSON lacks, as transformers saves them in a config.json and only its `from_pretrained` reads back.
TAG = "__float__"
UNBOUNDED = {"Infinity": float("inf"), "-Infinity": -float("inf"), "NaN": float("nan")}
LEFT_OUT = ("quantization_config", "auto_map", "dtype", "torch_dtype", "architectures")
VISION: Mapping[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
    "patch_size": 4,
    "window_size": 16,
}
SHARED = "num_kv_shared_layers"  # of Gemma 3n and 4: its last layers, which use the keys of earlier ones of their kind
INDEXES = ("attn_layer_indices", "mlp_only_layers")  # the layers of a kind: Bamba's attention, dense ones of experts
PATTERN = "hybrid_override_pattern"  # of Nemotron-H: the kinds of its layers, a letter each
SCALED = ("short_factor", "long_factor")  # lists of a rope with a number for each pair of dimensions
PERIODS = (
    *("full_attention_interval", "attn_layer_period", "attn_layer_offset", "expert_layer_period"),
    *("decoder_sparse_step", "moe_layer_freq", "moe_layer_interval"),
)
MOST_LAYERS, LEAST_LAYERS = 8, 4


def small_copy(
    config: Mapping[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32, rope_range: int | None = None
) -> Target:
    """The small model of a complete config.json, with weights so large that every token depends on all before it.

    rope_range: as of `small_config`. Raises DataError where transformers can make none of it, or one that does not run:
    sizes of some types depend on each other in ways that SMALL does not know, which says nothing of the target.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return _small_copy(config, dtype, rope_range)
        except DataError:
            raise
        except Exception as error:  # a class that is given sizes which it does not take may raise anything
            if lacks_memory(error):
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise DataError(f"no small copy of this {config.get('model_type')} can be made: {reason}") from error


def _small_copy(config: Mapping[str, Any], dtype: torch.dtype, rope_range: int | None) -> Target:
    family = family_of(config)
    content = small_config(config, rope_range)
    choices = {"attn_implementation": chosen_attention(family)}
    if dtype == torch.float64:  # which products of grouped experts do not support
        choices["experts_implementation"] = "eager"
    made = AutoConfig.for_model(**content)
    made.tie_word_embeddings = family.tied
    model = family.auto_class.from_config(made, **choices).to(dtype).eval()
    _make_lively(model)
    with torch.inference_mode():
        model(input_ids=torch.arange(1, 20)[None], use_cache=False)
    text = text_part(with_defaults(content))
    info = {"num_layers": text["num_hidden_layers"], "hidden_size": text["hidden_size"], "eos_token_ids": []}
    return Target(model.requires_grad_(False), info, torch.device("cpu"))


def small_config(config: Mapping[str, Any], rope_range: int | None = None) -> dict[str, Any]:
    """A config.json with small sizes; kinds of layers, ropes and all that is no size stay.

    rope_range: positions behind which the angles of some ropes change; default: as in the config.
    """
    content = {name: with_floats(value) for name, value in config.items() if name not in LEFT_OUT}
    inner = content.get("text_config")
    by_class = _text_by_class(content)
    if not inner:
        return _small_text({**by_class, **content}, rope_range)
    inner = {**by_class, **{name: value for name, value in inner.items() if name not in LEFT_OUT}}
    content["text_config"] = _small_text(inner, rope_range)
    if content.get("vision_config"):
        seeing = content["vision_config"]
        content["vision_config"] = seeing | {name: value for name, value in VISION.items() if name in seeing}
    return content


def with_floats(value: Any) -> Any:
    """A value of a config.json, with the numbers that UNBOUNDED names."""
    if isinstance(value, Mapping):
        tagged = value.get(TAG) if len(value) == 1 else None
        if isinstance(tagged, str) and tagged in UNBOUNDED:
            return UNBOUNDED[tagged]
        return {name: with_floats(each) for name, each in value.items()}
    return [with_floats(each) for each in value] if isinstance(value, list) else value


def has_range(config: Mapping[str, Any]) -> bool:
    """Whether the config has a rope with a first range of positions."""
    return small_config(config) != small_config(config, rope_range=1)


def _text_by_class(content: Mapping[str, Any]) -> dict[str, Any]:
    """What the class makes of the text part: sizes and ids that the file leaves to it, and what it says of each layer,
    such as its kind where the file has only a number or a pattern. Empty where it makes no config of the file.
    """
    try:
        text = AutoConfig.for_model(**deepcopy(dict(content))).get_text_config().to_dict()
    except Exception as error:  # classes may raise anything
        if lacks_memory(error):
            raise
        return {}
    return {name: value for name, value in text.items() if name not in LEFT_OUT}


def _is_of_layers(value: Any, depth: int) -> bool:
    return isinstance(value, list) and len(value) == depth


def _small_text(text: Mapping[str, Any], rope_range: int | None) -> dict[str, Any]:
    depth = text["num_hidden_layers"]
    small = {name: value for name, value in text.items() if name not in COMPUTED}
    chosen = _chosen_layers(text)
    layers = _layers(text)
    if SHARED in text:  # behind layers of every kind
        small[SHARED] = min(text[SHARED] or 0, layers, depth - layers) if text.get("layer_types") else 0
        chosen += range(layers, layers + small[SHARED])
    for name, value in text.items():
        if name in SMALL and isinstance(value, int) and value:
            small[name] = SMALL[name]
        elif _is_of_layers(value, depth):
            small[name] = [value[layer] for layer in chosen]
        elif name == PATTERN and len(value) == depth:
            small[name] = "".join(value[layer] for layer in chosen)
        elif name in INDEXES and value:
            small[name] = [place for place, layer in enumerate(chosen) if layer in value]
        elif name.endswith("_token_id") and value is not None:
            small[name] = 0
    if "head_dim" in text:  # which may be null
        small["head_dim"] = HEAD
    small["num_hidden_layers"] = len(chosen)
    if text.get(ENDS) not in (None, text["hidden_size"]):
        small[ENDS] = small["hidden_size"] // 2
    heads, keys = text.get("num_attention_heads") or 1, text.get("num_key_value_heads")
    if keys:
        small["num_key_value_heads"] = 4 if keys >= heads else min(keys, 2)
    rotary = int(small.get("head_dim") or HEAD)
    for name in ("rope_parameters", "rope_scaling"):
        if text.get(name):
            small[name] = _small_rope(text[name], int(rotary * (text.get("partial_rotary_factor") or 1)))
    return small if rope_range is None else _with_range(small, rope_range)


def _with_range(text: dict[str, Any], rope_range: int) -> dict[str, Any]:
    tables: list[Any] = [text, *ropes_of(text)]
    for table in tables:
        if table.get(ORIGINAL):
            table[ORIGINAL] = rope_range
    if any("dynamic" in (rope.get("rope_type"), rope.get("type")) for rope in tables):
        text["max_position_embeddings"] = rope_range
    return text


def _chosen_layers(text: Mapping[str, Any]) -> list[int]:
    """The first layers, and the first of each kind that is not among them, by what the config says of each layer."""
    depth = text["num_hidden_layers"]
    chosen = list(range(_layers(text)))
    of_each = [value for name, value in text.items() if _is_of_layers(value, depth) or name == PATTERN]
    indexes = [text[name] for name in INDEXES if text.get(name)]
    kinds = [(*(str(value[k]) for value in of_each), *(k in each for each in indexes)) for k in range(depth)]
    found = {kinds[layer] for layer in chosen}
    for layer in range(len(chosen), depth):
        if kinds[layer] not in found:
            found.add(kinds[layer])
            chosen.append(layer)
    return chosen


def _layers(text: Mapping[str, Any]) -> int:
    """The fewest first layers that have every kind of the first MOST_LAYERS."""
    depth = min(text["num_hidden_layers"], MOST_LAYERS)
    kinds = text.get("layer_types") or text.get("layers_block_type") or text.get(PATTERN) or []
    found = kinds[:depth]
    last = max((found.index(kind) for kind in set(found)), default=0)
    periods = [text[name] for name in PERIODS if isinstance(text.get(name), int)]
    return int(min(depth, max(LEAST_LAYERS, last + 1, *periods)))


def _small_rope(rope: Mapping[str, Any], rotary: int) -> dict[str, Any]:
    small = dict(rope)
    for name, value in rope.items():
        if isinstance(value, Mapping):
            small[name] = _small_rope(value, rotary)
    half = int(rotary * (rope.get("partial_rotary_factor") or 1)) // 2
    for name in SCALED:
        if rope.get(name):
            small[name] = rope[name][:half]
    if rope.get("mrope_section"):
        small["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]
    return small


@torch.no_grad()
def _make_lively(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        if weight.ndim >= 2:
            weight.normal_(std=0.3 if "embed" in name else 2 * weight.shape[-1] ** -0.5)
        else:  # biases, which are zero, and scales of norms
            weight.add_(torch.randn_like(weight), alpha=0.1)
