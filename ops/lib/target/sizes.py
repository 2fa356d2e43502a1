"""Sizes of a target from its config.json: parameters of each part, and the state of a sequence.

Counts are exact for the families of ops/lib/vision/families.py.

Legend: M hidden size, W intermediate size, H query heads, G key/value heads, D head size, V vocabulary, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from dsl.errors import DataError
from ops.lib.data.files import shown_json
from ops.lib.vision.family_config import is_tied, patch_dim, text_part
from ops.lib.vision.processor_files import check_sizes

ITEM_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
LINEAR = "linear_attention"
# The sizes that every target has, and the most of each that dflow computes with.
MOST = {"vocab_size": 10**8, "hidden_size": 10**6, "num_attention_heads": 10**5, "num_hidden_layers": 10**4}

Config = Mapping[str, Any]


@frozen(kw_only=True)
class TargetSizes:
    """The numbers of parameters in the parts of a target.

    head: 0 if it is the embedding. mtp: layers that predict several tokens; they are in the files but not loaded. text,
    vision: those parts of the config.
    """

    embedding: int
    head: int
    layers: int
    vision: int
    mtp: int
    text: Config
    seeing: Config | None

    @classmethod
    def of(cls, config: Config) -> TargetSizes:
        """The sizes of a config. Raises DataError where one is missing or impossible."""
        text = text_part(config)
        seeing = config.get("vision_config")
        try:
            for name, most in MOST.items():
                if not (isinstance(text[name], int) and 0 <= text[name] <= most):
                    raise ValueError(f"{name} is {text[name]!r}, not a number up to {most}")
            V, M = text["vocab_size"], text["hidden_size"]
            sizes = cls(
                embedding=V * M,
                head=0 if is_tied(config) else V * M,
                layers=sum(_layer(text, kind) + _mlp(text, index) for index, kind in enumerate(layer_types(text))) + M,
                vision=_vision(seeing) if seeing else 0,
                mtp=_mtp(text),
                text=text,
                seeing=seeing,
            )
            if min(sizes.parameters, head_dim(text), sizes.state_per_sequence) < 0:
                raise ValueError("a size is negative")
            return sizes
        except KeyError as error:
            raise DataError(f"config.json: {error.args[0]} is missing, so the target's size is unknown") from None
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise DataError(f"config.json: the target's size cannot be computed: {error}") from None

    @property
    def parameters(self) -> int:
        """Number of loaded parameters."""
        return self.embedding + self.head + self.layers + self.vision

    @property
    def state_per_sequence(self) -> int:
        """The number of state elements of a sequence in all linear attention layers, recurrent and convolutional."""
        linear = sum(kind == LINEAR for kind in layer_types(self.text))
        if not linear:
            return 0
        keys, values, heads = _linear_widths(self.text)
        recurrent = heads * self.text["linear_key_head_dim"] * self.text["linear_value_head_dim"]
        return linear * (recurrent + self.text["linear_conv_kernel_dim"] * (2 * keys + values))


def context_length(text: Config) -> int | None:
    """The number of positions that a target supports, from the text part of its config; None if it names none."""
    trained = text.get("max_position_embeddings")
    if not isinstance(trained, int):
        return None
    return positions(trained, text.get("rope_parameters") or text.get("rope_scaling"))


def positions(trained: int, rope: Config | None) -> int:
    """The number of positions of a model: by its config, or by its RoPE scaling if that is larger."""
    scaling = rope or {}
    stretched = (scaling.get("factor") or 1.0) * (scaling.get("original_max_position_embeddings") or trained)
    return max(trained, int(stretched))


def layer_types(text: Config) -> list[str]:
    """The kind of every decoder layer; Qwen3.5's default is one of full attention after three of linear attention."""
    count = text["num_hidden_layers"]
    if "linear_num_value_heads" not in text:
        return ["full_attention"] * count
    every = text.get("full_attention_interval") or 4
    default = ["full_attention" if (index + 1) % every == 0 else LINEAR for index in range(count)]
    return list(text.get("layer_types") or default)


def check_tables(config: Config) -> None:
    """Check that the tables in a config.json are objects, and vision sizes plausible. Raises DataError."""
    for name in ("text_config", "vision_config"):
        _check_table(config, name)
    for table in (config, config.get("text_config") or {}):
        for name in ("rope_parameters", "rope_scaling"):
            _check_table(table, name)
    check_sizes("config.json: vision_config", config.get("vision_config"))


def _check_table(table: Config, name: str) -> None:
    if not isinstance(table.get(name), (Mapping, type(None))):
        raise DataError(f"config.json: {name} must be an object, got {shown_json(table[name])}")


def named_dtype(config: Config) -> str | None:
    """The dtype that a target's config.json names; None without one. Raises DataError for an invalid value."""
    text = config.get("text_config")
    tables = (config, text) if isinstance(text, Mapping) else (config,)
    found = next(((key, table[key]) for key in ("dtype", "torch_dtype") for table in tables if table.get(key)), None)
    if found is None:
        return None
    key, named = found
    if not isinstance(named, str):
        raise DataError(f'config.json: {key} must be the name of a dtype, such as "bfloat16", got {json.dumps(named)}')
    return named


def head_dim(text: Config) -> int:
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])


def _layer(text: Config, kind: str) -> int:
    """The parameters of a decoder layer without its MLP: two norms, and attention or linear attention."""
    M = text["hidden_size"]
    return 2 * M + (_linear_attention(text) if kind == LINEAR else _attention(text))


def _attention(text: Config) -> int:
    M, D = text["hidden_size"], head_dim(text)
    H = text["num_attention_heads"]
    G = text.get("num_key_value_heads", H)
    gated = bool(text.get("attn_output_gate", "linear_num_value_heads" in text))
    query = H * D * (1 + gated)
    products = M * query + 2 * M * G * D + H * D * M
    if "qwen2" in text.get("model_type", ""):
        return products + query + 2 * G * D  # biases, without norms of queries and keys
    biases = query + 2 * G * D + M if text.get("attention_bias") else 0
    return products + biases + 2 * D


def _linear_widths(text: Config) -> tuple[int, int, int]:
    """The widths of keys and values, and the number of value heads, of a gated delta rule."""
    heads = text["linear_num_value_heads"]
    return (
        text["linear_num_key_heads"] * text["linear_key_head_dim"],
        heads * text["linear_value_head_dim"],
        heads,
    )


def _linear_attention(text: Config) -> int:
    M = text["hidden_size"]
    keys, values, heads = _linear_widths(text)
    mixed = 2 * keys + values
    products = M * (mixed + values + 2 * heads) + values * M
    return products + mixed * text["linear_conv_kernel_dim"] + 2 * heads + text["linear_value_head_dim"]


def _mlp(text: Config, layer: int) -> int:
    """The parameters of an MLP: a gated one, or a router with experts and, in some families, a gated shared expert."""
    M, E = text["hidden_size"], _experts(text)
    dense = layer in (text.get("mlp_only_layers") or []) or (layer + 1) % (text.get("decoder_sparse_step") or 1) != 0
    if not E or dense:
        return int(3 * M * text["intermediate_size"])
    shared = text.get("shared_expert_intermediate_size") or 0
    routed = E * (M + 3 * M * text["moe_intermediate_size"])
    return int(routed + (3 * M * shared + M if shared else 0))


def _experts(text: Config) -> int:
    """The number of experts in a layer, which transformers writes under another name."""
    return int(text.get("num_experts") or text.get("num_local_experts") or 0)


def _mtp(text: Config) -> int:
    """The parameters of the layers that predict several tokens: full attention after a projection, with three norms."""
    count, M = text.get("mtp_num_hidden_layers") or 0, text["hidden_size"]
    if not count:
        return 0
    return count * (_layer(text, "full_attention") + _mlp(text, 0)) + 2 * M * M + 3 * M


def _vision(vision: Config) -> int:
    """The parameters of Qwen's vision tower, including its mergers."""
    M, W, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    merged = M * vision.get("spatial_merge_size", 2) ** 2
    attention = 3 * M * M + 3 * M + M * M + M
    merger = merged * merged + merged + merged * out + out
    if "qwen2" in vision.get("model_type", ""):
        mlp = 3 * M * W + 2 * W + M
        return int(patch_dim(vision) * M + vision["depth"] * (2 * M + attention + mlp) + M + merger)
    mlp = 2 * M * W + W + M
    blocks = vision["depth"] * (4 * M + attention + mlp)
    deepstack = len(vision.get("deepstack_visual_indexes") or []) * (2 * merged + merger)
    stem = patch_dim(vision) * M + M + vision["num_position_embeddings"] * M
    return int(stem + blocks + 2 * M + merger + deepstack)
