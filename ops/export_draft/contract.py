"""The serving contract of a draft, checked on the files: what an engine would not check, or would only notice late.

An engine that misses a tensor serves random weights without a word, so nothing here is a warning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from dsl.errors import ConfigError, DataError
from ops.dflash.config import ARCHITECTURE, FORMAT, from_serving, missing_fields
from ops.files import read_json

FILES = {"config.json", "model.safetensors"}
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_SIZE_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
)


def check_serving(directory: Path, target: Mapping[str, Any]) -> None:
    """Check a serving directory against the contract and its target (target.json).

    Reads the tensors' names, shapes and dtypes, not their values. Raises DataError that lists all mistakes.
    """
    mistakes = [f"{name}: is missing" for name in sorted(FILES) if not (directory / name).is_file()]
    mistakes += [f"{path.name}: does not belong here" for path in sorted(directory.iterdir()) if path.name not in FILES]
    if (directory / "config.json").is_file():
        config = read_json(directory / "config.json")
        mistakes += config_mistakes(config, target)
        if (directory / "model.safetensors").is_file():
            mistakes += tensor_mistakes(config, _stored_tensors(directory / "model.safetensors"))
    if mistakes:
        raise DataError(
            f"{directory}: the draft breaks the serving contract:\n" + "\n".join(f"  {line}" for line in mistakes)
        )


def config_mistakes(config: Mapping[str, Any], target: Mapping[str, Any]) -> list[str]:
    """What is wrong with a config.json, by itself and beside the target's target.json."""
    missing = missing_fields(config)
    mistakes = [f"config.json: {name} is missing" for name in missing]
    for name, expected in (
        ("architectures", [ARCHITECTURE]),
        ("hidden_act", "silu"),
        ("vocab_size", target["vocab_size"]),
        ("hidden_size", target["hidden_size"]),
        ("num_target_layers", target["num_layers"]),
    ):
        if name in config and config[name] != expected:
            mistakes.append(f"config.json: {name} must be {json.dumps(expected)}, got {json.dumps(config[name])}")
    if "dtype" in config and config["dtype"] not in DTYPES:
        mistakes.append(f"config.json: dtype must be one of {', '.join(DTYPES)}, got {json.dumps(config['dtype'])}")
    if not missing:
        if config["dflow"]["format"] != FORMAT:
            mistakes.append(f"config.json: dflow.format must be {FORMAT}, got {json.dumps(config['dflow']['format'])}")
        if config["dflash_config"]["mask_token_id"] in target["eos_token_ids"]:
            mistakes.append("config.json: dflash_config.mask_token_id is an EOS id of the target")
        try:
            from_serving(config)
        except ConfigError as error:
            mistakes += [f"config.json: {line.strip()}" for line in str(error).splitlines()[1:]]
    return mistakes


def tensor_mistakes(config: Mapping[str, Any], stored: Mapping[str, tuple[tuple[int, ...], str]]) -> list[str]:
    """What is wrong with the tensors, given as name -> (shape, safetensors dtype), beside a config.json.

    Where the config lacks a size there is nothing to compare with, and the config's own mistakes say so.
    """
    ids = (config.get("dflash_config") or {}).get("target_layer_ids")
    if not isinstance(ids, list) or not all(isinstance(config.get(name), int) for name in _SIZE_FIELDS):
        return []
    expected = expected_shapes(config)
    mistakes = [f"model.safetensors: {name} is missing" for name in expected if name not in stored]
    mistakes += [f"model.safetensors: {name} does not belong here" for name in stored if name not in expected]
    dtype = DTYPES.get(config.get("dtype", ""))
    for name in expected.keys() & stored.keys():
        shape, stored_dtype = stored[name]
        if shape != expected[name]:
            mistakes.append(f"model.safetensors: {name} must be {list(expected[name])}, got {list(shape)}")
        if dtype is not None and stored_dtype != dtype:
            mistakes.append(f"model.safetensors: {name} must be of dtype {dtype}, got {stored_dtype}")
    return sorted(mistakes)


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of the serving contract for a config.json, with their shapes."""
    hidden, head_dim, mlp = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layers = len(config["dflash_config"]["target_layer_ids"])
    shapes = {"fc.weight": (hidden, layers * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    projections = {"q_proj": (q_size, hidden), "k_proj": (kv_size, hidden), "v_proj": (kv_size, hidden)}
    projections["o_proj"] = (hidden, q_size)
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (hidden,)
        for norm in ("q_norm", "k_norm"):
            shapes[f"{layer}.self_attn.{norm}.weight"] = (head_dim,)
        for name, shape in projections.items():
            shapes[f"{layer}.self_attn.{name}.weight"] = shape
            if config.get("attention_bias"):
                shapes[f"{layer}.self_attn.{name}.bias"] = shape[:1]
        for name in ("gate_proj", "up_proj"):
            shapes[f"{layer}.mlp.{name}.weight"] = (mlp, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, mlp)
    return shapes


def _stored_tensors(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    with safe_open(path, framework="pt") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (no mapping)
        return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
