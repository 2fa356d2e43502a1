"""The folder of an EAGLE-3 draft, by its config.json, the headers of its files, and its vocabulary. Loads no torch.

The form is that of SGLang's class LlamaForCausalLMEagle3, in which SpecForge and EAGLE's authors publish. Its variants
are not computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from ops.lib.data.files import read_object, shown_json
from ops.lib.target.checkpoint_check import draft_folder_mistakes, stored_tensors
from ops.lib.target.quantised import UNQUANTISED
from ops.lib.target.stored_weights import StoredTensor, listed

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")  # one class, by SGLang's and vLLM's names
IDS = "eagle_aux_hidden_state_layer_ids"
# Fields of other computations. By `layer_ids` vLLM counts the layers that read, and SGLang knows no such field.
VARIANTS = (
    *("norm_output", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_before_residual", "bias", "attention_bias"),
    *("mlp_bias", "tie_word_embeddings", "layer_ids"),
)
USUAL = {"partial_rotary_factor": 1, "hidden_act": "silu", "num_hidden_layers": 1, "use_aux_hidden_state": True}
COUNTS = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
OTHER_COUNTS = ("num_key_value_heads", "head_dim", "draft_vocab_size")  # which may be left out
ROPES = ("default", "linear", "llama3")
EMBEDDING, HEAD, TO_TARGET = "embed_tokens.weight", "lm_head.weight", "d2t"
UNUSED = re.compile(r"t2d$|.*\.rotary_emb\.inv_freq$")
SAVE_AGAIN = (
    "no *.safetensors, and pickled files may run code when they are loaded: save their tensors again as "
    "model.safetensors, by save_file of safetensors.torch with what torch.load(FILE, weights_only=True) gives"
)


def eagle3_mistake(directory: Path, target: Mapping[str, int] | None) -> str:
    """A text on why answers cannot be decoded with the EAGLE-3 draft of a folder; empty if they can.

    target: hidden_size, vocab_size and num_layers of the target, None if they are not known.
    """
    if not any(directory.glob("*.safetensors")) and any(directory.glob("*.bin")):
        return f"{directory}: {SAVE_AGAIN}"
    if mistakes := draft_folder_mistakes(directory):
        return "\n".join(mistakes)
    config = read_object(directory / "config.json")
    mistake = _config_mistake(config) or _tensors_mistake(config, eagle3_tensors(directory))
    if not mistake and target is not None:
        mistake = _target_mistake(config, target)
    return mistake and f"{directory}: {mistake}"


def eagle3_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder, by their names in SGLang's class, without "model."."""
    return {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): tensor
        for name, tensor in stored_tensors(directory).items()
    }


def layer_ids(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers of the target whose outputs the draft reads.

    Source: SGLang 0.5.23, models/qwen3.py, set_eagle3_layers_to_capture, which counts the layers that read them.
    """
    named = _of_eagle(config).get(IDS)
    return (1, num_layers // 2 - 1, num_layers - 4) if named is None else tuple(named)


def head_sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """The numbers of query heads and of key/value heads, and the size of a head."""
    heads = config["num_attention_heads"]
    return heads, config.get("num_key_value_heads") or heads, config.get("head_dim") or config["hidden_size"] // heads


def read_tensor(tensor: StoredTensor) -> Any:
    """A tensor of whole numbers as a NumPy array."""
    with safe_open(tensor.file, framework="numpy") as file:
        return file.get_tensor(tensor.name)


def _of_eagle(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("eagle_config") or {}


def _rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _config_mistake(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not any(name in ARCHITECTURES for name in architectures):
        return (
            f"its architectures are {shown_json(architectures)}, and dflow decodes with EAGLE-3 drafts of the class "
            f"{ARCHITECTURES[0]}, as SGLang serves them and SpecForge writes them"
        )
    eagle, rope = _of_eagle(config), _rope_of(config)
    if not isinstance(eagle, Mapping) or not isinstance(rope, Mapping):
        return "eagle_config, rope_scaling and rope_parameters of config.json are objects, or left out"
    counts = {name: config.get(name) for name in COUNTS}
    counts |= {name: config[name] for name in OTHER_COUNTS if config.get(name) is not None}
    if wrong := [f"{name} = {shown_json(value)}" for name, value in counts.items() if not _is_count(value)]:
        return f"config.json needs positive whole numbers, and has {', '.join(wrong)}"
    every = {**config, **eagle}
    differs = {name: every[name] for name in VARIANTS if every.get(name)}
    differs |= {name: every[name] for name, usual in USUAL.items() if every.get(name, usual) != usual}
    if IDS in config:
        differs[IDS] = config[IDS]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPES or "mrope_section" in rope:
        differs["rope_type"] = kind if "mrope_section" not in rope else "mrope"
    if differs:
        shown = ", ".join(f"{name} = {shown_json(value)}" for name, value in differs.items())
        return f"config.json has {shown}, a variant of EAGLE-3 that dflow does not compute"
    ids = eagle.get(IDS)
    if ids is None or (isinstance(ids, list) and ids and all(type(each) is int for each in ids)):
        return ""
    return f"{IDS} of eagle_config is {shown_json(ids)}, and no list of layers"


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _shapes(config: Mapping[str, Any], features: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that a draft has. features: layers of the target that it reads."""
    M, width, (heads, of_keys, size) = config["hidden_size"], config["intermediate_size"], head_sizes(config)
    rows, vocabulary = config.get("draft_vocab_size"), config["vocab_size"]
    named: dict[str, tuple[int, ...]] = {
        "fc": (M, features * M),
        "norm": (M,),
        **{f"layers.0.{name}": (M,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "layers.0.self_attn.q_proj": (heads * size, 2 * M),
        "layers.0.self_attn.k_proj": (of_keys * size, 2 * M),
        "layers.0.self_attn.v_proj": (of_keys * size, 2 * M),
        "layers.0.self_attn.o_proj": (M, heads * size),
        "layers.0.mlp.gate_proj": (width, M),
        "layers.0.mlp.up_proj": (width, M),
        "layers.0.mlp.down_proj": (M, width),
    }
    shapes = {f"{name}.weight": shape for name, shape in named.items()}
    if rows is not None:  # else the head is the target's
        shapes[HEAD] = (rows, M)
    return shapes | ({} if rows in (None, vocabulary) else {TO_TARGET: (rows,)})


def _tensors_mistake(config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> str:
    ids = _of_eagle(config).get(IDS)
    shapes = _shapes(config, config.get("num_aux_hidden_states") or (3 if ids is None else len(ids)))
    if missing := sorted(shapes.keys() - stored.keys()):
        return f"the files lack {listed(missing)} of an EAGLE-3 draft: copy them again"
    rows, vocabulary = config.get("draft_vocab_size"), config["vocab_size"]
    optional = {EMBEDDING: (vocabulary, config["hidden_size"])} | ({} if rows is None else {TO_TARGET: (rows,)})
    shapes = optional | shapes
    if unknown := sorted(name for name in stored.keys() - shapes.keys() if not UNUSED.match(name)):
        head = ", and SGLang would replace it by the target's: set draft_vocab_size in config.json to its rows"
        return f"an EAGLE-3 draft has no {listed(unknown)}{head if unknown == [HEAD] else ''}"
    held = {name: stored[name] for name in shapes if name in stored}
    if wrong := [f"{name} {list(held[name].shape)}" for name in sorted(held) if held[name].shape != shapes[name]]:
        return f"the files hold other sizes than config.json: {listed(wrong)}"
    mapped = held.pop(TO_TARGET, None)
    if quantised := sorted(name for name, tensor in held.items() if tensor.dtype not in UNQUANTISED):
        return f"its tensors are quantised ({listed(quantised)}): give the unquantised draft"
    return "" if mapped is None else _vocabulary_mistake(mapped, vocabulary)


def _vocabulary_mistake(mapped: StoredTensor, vocabulary: int) -> str:
    """mapped: for each token of the draft, the number that is added to it to give the target's."""
    if mapped.dtype not in ("I64", "I32"):
        return f"{TO_TARGET} is no tensor of whole numbers, but {mapped.dtype}"
    tokens = read_tensor(mapped).astype(np.int64) + np.arange(mapped.shape[0])
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        return (
            f"{TO_TARGET} gives tokens from {tokens.min()} to {tokens.max()}, outside the vocabulary of {vocabulary}: "
            "its numbers are the target's token less the draft's"
        )
    if len(np.unique(tokens)) < len(tokens):
        return f"{TO_TARGET} gives one token of the target for two of the draft"
    return ""


def _target_mistake(config: Mapping[str, Any], target: Mapping[str, int]) -> str:
    hidden = (config["hidden_size"], config.get("target_hidden_size") or config["hidden_size"])
    for name, sizes in (("hidden_size", hidden), ("vocab_size", (config["vocab_size"],))):
        if wrong := [size for size in sizes if size != target[name]]:
            return f"its {name} is {wrong[0]}, and the target's {target[name]}: it is the draft of another target"
    count = target["num_layers"]
    ids = layer_ids(config, count)
    if ids[0] < 0 or ids[-1] > count - 2 or any(later <= earlier for earlier, later in pairwise(ids)):
        named = f"{IDS} of eagle_config" if _of_eagle(config).get(IDS) else f"eagle_config has no {IDS}, so it"
        return (
            f"{named} reads the layers {', '.join(map(str, ids))}: of a target of {count} layers, ascending ones "
            f"from 0 to {count - 2} can be read"
        )
    return ""
