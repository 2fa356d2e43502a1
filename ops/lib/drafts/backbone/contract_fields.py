"""Where the fields of the serving contract stand in a config.json, and the tensors that belong to it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ops.lib.drafts.algorithms import part_of
from ops.lib.drafts.backbone.config import algorithm_of, example

NESTS = ("dflash_config", "dflow")
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # config.json's names -> safetensors'


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of the serving contract for a config.json, with their shapes."""
    hidden, head_dim, mlp = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layers = len(lookup(config, full_name("target_layer_ids", config))[1])
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
    own: Mapping[str, tuple[int, ...]] = contract_part(config, "shapes")(config)
    return {**shapes, **own}


def contract_part(config: Mapping[str, Any], name: str) -> Any:
    """What the config's algorithm says of its tensors and fields."""
    return part_of(algorithm_of(config), f"config:{name}")


def table_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of a config.json; empty where there is none."""
    table = config.get(name)
    return table if isinstance(table, Mapping) else {}


def lookup(config: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    """Whether a field such as "dflash_config.mask_token_id" exists, and its value."""
    nest, _, inner = name.rpartition(".")
    table = table_of(config, nest) if nest else config
    return inner in table, table.get(inner)


def full_name(name: str, config: Mapping[str, Any]) -> str:
    """A field of DraftConfig as config.json nests it."""
    fields = example(config)
    return next((f"{nest}.{name}" for nest in NESTS if name in fields.get(nest, {})), name)
