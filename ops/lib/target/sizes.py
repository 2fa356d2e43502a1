"""Sizes of a target from its config.json: parameters of each part, and the state of a sequence.

Counts are exact for Qwen's families, and for others by the shapes of their tensors: those in the files, or without
files those of a model without weights, made in a process of its own, since that loads torch. Types whose config says
enough, within a hundredth, are counted by it, and so are those that transformers does not know.

Legend: M hidden size, W intermediate size, H query heads, G key/value heads, D head size, V vocabulary, E experts.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

from attrs import frozen

from dsl.errors import DataError
from dsl.imports import child_environment, module_command
from ops.lib.data.files import shown_json
from ops.lib.target.stored_weights import EMBED_ENDINGS, HEAD_ENDINGS, listed
from ops.lib.vision.config_classes import has_language_model
from ops.lib.vision.family_config import OF_IMAGES, is_qwen, is_tied, patch_dim, text_part, vision_part
from ops.lib.vision.processor_files import check_sizes

ITEM_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SCALE_BYTES = 4  # of a state in float8
LINEAR = "linear_attention"
# The sizes that every target has, and the most of each that dflow computes with.
MOST = {"vocab_size": 10**8, "hidden_size": 10**6, "num_attention_heads": 10**5, "num_hidden_layers": 10**4}

# Types whose config says enough: gated MLPs or experts, and grouped or latent attention.
UNGATED = ("apertus", "arcee", "gpt_neox", "jais2", "nanochat", "persimmon", "phi", "starcoder2")
BY_CONFIG = (
    *UNGATED,
    *("bitnet", "cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5"),
    *(
        "ernie4_5_moe",
        "exaone4",
        "exaone_moe",
        "flex_olmo",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
    ),
    *("glm_moe_dsa", "gpt_oss", "granite", "granitemoe", "granitemoeshared", "helium", "hyperclovax", "llama"),
    *("minimax_m2", "ministral3", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "phi3", "phimoe", "qwen2"),
    *("qwen2_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "vaultgemma", "youtu"),
)
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")  # of a layer

# Attention's masks and scores: bytes of an element, and those above which the target runs in chunks.
MASK_BYTES = 6  # a bool, another while it is made, and a number that is added to the scores
SCORE_BYTES = 12  # scores, what is added to them, and their softmax in float32
MOST_BYTES = 2 << 30
LEAST_CHUNK = 64  # tokens: fewer would read all weights for little
SINKS = ("gpt_oss",)  # types whose scores are computed one by one
STANDARD_LAYERS = ("full_attention", "sliding_attention")

Config = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


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
    def of(cls, config: Config, shapes: Shapes | None = None) -> TargetSizes:
        """Sizes by a config with its defaults. shapes: of the tensors in the files, where there are files.

        Raises DataError for a config that lacks a size, or has an impossible one.
        """
        text = text_part(config)
        seeing = vision_part(config)
        try:
            for name, most in MOST.items():
                if not (isinstance(text[name], int) and 0 <= text[name] <= most):
                    raise ValueError(f"{name} is {text[name]!r}, not a number up to {most}")
            V, M = text["vocab_size"], text["hidden_size"]
            ends = {"embedding": V * M, "head": 0 if is_tied(config) else V * M}
            parts = _qwen_parts(text, seeing) if is_qwen(config) else _any_parts(config, shapes)
            sizes = cls(**ends, **parts, text=text, seeing=seeing)
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


@frozen
class PassSizes:
    """The bytes of a forward pass of a target, by the text part of its config and the bytes of a number."""

    text: Config
    item_size: int

    def layer(self, tokens: int) -> int:
        """The most that a decoder layer holds of the tokens: beside the residual, attention's states or the MLP's."""
        text, M, D = self.text, int(self.text["hidden_size"]), head_dim(self.text)
        H = int(text["num_attention_heads"])
        attention = 3 * D * (H + (text.get("num_key_value_heads") or H))
        if "linear_num_value_heads" in text:
            keys, values, _ = _linear_widths(text)
            attention = max(attention, 4 * (2 * keys + values))
        experts = text.get("num_experts_per_tok") or 0
        width = max(
            text.get("intermediate_size") or 0,
            experts * (text.get("moe_intermediate_size") or (text.get("intermediate_size") or 0)),
        )
        in_float32 = 2 * M * 4  # a norm
        return tokens * (self.item_size * (2 * M + 2 * D + max(attention, 4 * width)) + in_float32)

    def states(self, tokens: int, layers: int) -> int:
        """The captured states of some layers, and all of them side by side."""
        return 2 * layers * tokens * int(self.text["hidden_size"]) * self.item_size

    def cache(self, tokens: int) -> int:
        """Keys and values of all layers of attention, and of one more that is being copied."""
        layers = 1 + sum(kind != LINEAR for kind in layer_types(self.text))
        heads = self.text.get("num_key_value_heads") or self.text["num_attention_heads"]
        return 2 * layers * tokens * int(heads) * head_dim(self.text) * self.item_size

    def masks(self, rows: int, longest: int) -> int:
        """Masks and scores of attention for rows of tokens, padded where there are several."""
        text = self.text
        window = text.get("sliding_window") if text.get("use_sliding_window") is not False else None
        is_eager = bool(text.get("attn_logit_softcapping")) or text.get("model_type") in SINKS
        size = int(text["num_attention_heads"]) * SCORE_BYTES if is_eager else MASK_BYTES
        if not is_eager and rows == 1 and (window is None or window >= longest):
            return 0
        whole = rows * longest**2 * size
        is_standard = set(text.get("layer_types") or ()) <= set(STANDARD_LAYERS) and not text.get(
            "attention_chunk_size"
        )
        if whole <= MOST_BYTES or not is_standard:
            return whole
        return max(MOST_BYTES, LEAST_CHUNK * rows * longest * size)

    def of_batch(self, rows: int, longest: int, layers: int) -> dict[str, int]:
        """The parts of a pass that captures some layers."""
        masks = self.masks(rows, longest)
        return {
            "captured states": self.states(rows * longest, layers),
            "a layer": self.layer(rows * longest),
            "masks": masks,
            "cache of chunks": self.cache(rows * longest) if masks >= MOST_BYTES else 0,
        }


def _qwen_parts(text: Config, seeing: Config | None) -> dict[str, int]:
    M = text["hidden_size"]
    return {
        "layers": sum(_layer(text, kind) + _mlp(text, index) for index, kind in enumerate(layer_types(text))) + M,
        "vision": _vision(seeing) if seeing else 0,
        "mtp": _mtp(text),
    }


def _any_parts(config: Config, shapes: Shapes | None) -> dict[str, int]:
    """Parameters of the parts of a model that is not Qwen's, both ends left out."""
    text = text_part(config)
    kind = config.get("model_type")
    if shapes is None and (kind in BY_CONFIG or not has_language_model(kind)):
        layers = sum(_any_attention(text) + _any_mlp(text, layer) for layer in range(text["num_hidden_layers"]))
        return {"layers": layers, "vision": 0, "mtp": 0}
    if shapes is None:
        shapes = shapes_without_weights(json.dumps(config))
    V, M, depth = (text[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers"))
    parts = {"layers": 0, "vision": 0, "mtp": 0}
    for name, shape in shapes.items():
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if layer is None and shape == (V, M) and name.endswith((*EMBED_ENDINGS, *HEAD_ENDINGS)):
            continue
        part = "layers"
        if any(word in name for word in OF_IMAGES):
            part = "vision"
        elif layer is not None and int(layer[1]) >= depth:
            part = "mtp"
        parts[part] += prod(shape)
    return parts


@lru_cache(maxsize=8)
def shapes_without_weights(config: str) -> Shapes:
    """The tensors of the model of a config.json's text, by name, with their shapes. Raises ValueError where there is
    none.
    """
    command = module_command("ops.lib.target.meta_model")
    made = subprocess.run(command, input=config, capture_output=True, text=True, env=child_environment(), check=False)
    if made.returncode:
        raise ValueError(made.stderr.strip().rpartition("\n")[2])
    return {name: tuple(shape) for name, shape in json.loads(made.stdout).items()}


def _any_attention(text: Config) -> int:
    """The projections of a layer: latent attention (MLA), or grouped heads."""
    M, H = text["hidden_size"], text["num_attention_heads"]
    if text.get("kv_lora_rank"):
        latent, query = text["kv_lora_rank"], text.get("q_lora_rank")
        rope, plain, value = (text[name] for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        queries = query * (M + H * (rope + plain)) if query else M * H * (rope + plain)
        return int(queries + M * (latent + rope) + latent * H * (plain + value) + H * value * M)
    return int(2 * M * head_dim(text) * (H + (text.get("num_key_value_heads") or H)))


def _any_mlp(text: Config, layer: int) -> int:
    """An MLP, or experts with a router and shared ones; all of them gated but for UNGATED."""
    M, E = text["hidden_size"], next((text[name] for name in EXPERTS if text.get(name)), 0)
    matrices = 2 if text.get("model_type") in UNGATED else 3
    if not E or layer < (text.get("first_k_dense_replace") or 0):
        return int(matrices * M * text["intermediate_size"])
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    shared = (text.get("n_shared_experts") or text.get("num_shared_experts") or 0) * width
    shared = shared or text.get("shared_expert_intermediate_size") or text.get("shared_intermediate_size") or 0
    return int(E * M + matrices * M * (E * width + shared))


def state_bytes(hidden_size: int, dtype: str, feature_dtype: str | None = None) -> int:
    """The bytes of a stored hidden state of one token and layer. feature_dtype: "float8", or None for `dtype`."""
    return hidden_size + SCALE_BYTES if feature_dtype == "float8" else hidden_size * ITEM_SIZES[dtype]


def context_length(text: Config) -> int | None:
    """The number of positions that a target supports, from the text part of its config; None if it names none."""
    trained, limit = text.get("max_position_embeddings"), rope_limit(text)
    if limit is not None or not isinstance(trained, int):
        return limit
    return positions(trained, text.get("rope_parameters") or text.get("rope_scaling"))


ORIGINAL = "original_max_position_embeddings"
FIXED_ROPES = ("default", "linear", "llama3", "yarn", "mrope", "proportional")  # angles by the position alone


def rope_limit(text: Config) -> int | None:
    """The longest text, in tokens, that its RoPE turns by the same angles whatever it is batched with; None for any.

    transformers takes those of "longrope" and "dynamic" by the longest text of a batch, SGLang's longrope by the last
    position of a batch, and vLLM's by the longest text that the server takes. text: the text part of a config.
    """
    limits = (
        text.get(ORIGINAL) or rope.get(ORIGINAL) or text.get("max_position_embeddings")
        for rope in ropes_of(text)
        if "long_factor" in rope or (rope.get("rope_type") or rope.get("type") or "default") not in FIXED_ROPES
    )
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def is_bounded(text: Config) -> bool:
    """Whether texts of more than `context_length` tokens are known to be wrong: the config states a RoPE. Without one
    the target may have no positions at all, and the number may stand for nothing.
    """
    return bool(text.get("rope_theta") or ropes_of(text))


def too_long(tokens: int, limit: int, text: Config) -> str:
    """What is wrong with a sample of more tokens than limit, the `context_length`, as far as `is_bounded` knows it."""
    remedy = f"drop such samples with max_length = {limit} of tokenize_chat"
    if rope_limit(text) is not None:
        return (
            f"{tokens:,} tokens, and beyond {limit:,} the target's RoPE turns all texts of a batch by other angles, "
            f"each engine by its own rule: {remedy}"
        )
    if is_bounded(text):
        return (
            f"{tokens:,} tokens, more than the {limit:,} positions of the target ({positions_field(text)} of its "
            f"config.json), beyond which its states are poor and engines refuse requests: {remedy}"
        )
    return (
        f"{tokens:,} tokens, more than {positions_field(text)} = {limit} of the target's config.json, which states no "
        f"RoPE: whether the target reads so many is not known, and engines refuse such requests; if it does not, "
        f"{remedy}"
    )


def long_samples(records: Iterable[Mapping[str, Any]], text: Config) -> str:
    """A text that names the samples of more tokens than `context_length`, and what is wrong; empty without any.

    records: rows of samples.jsonl of tokens.
    """
    limit = context_length(text)
    if limit is None or not (beyond := {row["id"]: row["tokens"] for row in records if row["tokens"] > limit}):
        return ""
    several = len(beyond) > 1
    names = f"sample{'s' if several else ''} {listed(list(beyond))}"
    return f"{names}: {'up to ' if several else ''}{too_long(max(beyond.values()), limit, text)}"


def ropes_of(text: Config) -> list[Config]:
    """The tables of RoPE settings in the text part of a config, also those of each kind of layer."""
    tables = [text[name] for name in ("rope_parameters", "rope_scaling") if isinstance(text.get(name), Mapping)]
    inner = [each for table in tables for each in table.values() if isinstance(each, Mapping)]
    return [*tables, *inner]


def positions_field(text: Config) -> str:
    """The field of a config.json that `context_length` comes from."""
    limited = rope_limit(text) not in (None, text.get("max_position_embeddings"))
    return ORIGINAL if limited else "max_position_embeddings"


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
