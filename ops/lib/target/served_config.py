"""What a checkpoint directory needs beyond transformers so that SGLang loads the same model from it."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open

from dsl.errors import DataError
from ops.lib.data.files import read_json, write_json
from ops.lib.target.embedding_and_head import tensor_files
from ops.lib.target.model import read_config
from ops.lib.vision.families import Qwen3Vl, family_of, is_expert


def complete_config(directory: Path) -> None:
    """Adds to config.json what serving engines read and transformers omits; a complete file stays as it is."""
    config = read_json(directory / "config.json")
    complete = family_of(config).for_serving()
    if complete != config:
        write_json(directory / "config.json", complete)


def check_served(directory: Path) -> None:
    """Raises DataError for a checkpoint that SGLang loads differently from transformers, or not at all."""
    family = family_of(read_config(directory))
    try:
        family.check()
        family.check_serving()
    except DataError as error:
        raise DataError(f"{directory}: {error}") from None
    if isinstance(family, Qwen3Vl):
        _check_experts(directory, family.text_config["hidden_size"])


def _check_experts(directory: Path, hidden_size: int) -> None:
    """Raises DataError unless down projections are [experts, intermediate, hidden], as in the family's checkpoints."""
    files = tensor_files(directory)
    name = next((name for name in sorted(files) if is_expert(name) and name.endswith("down_proj")), None)
    if name is None:
        return
    with safe_open(files[name], framework="pt") as tensors:
        shape = tensors.get_slice(name).get_shape()
    if shape[2] != hidden_size:
        raise DataError(
            f"{files[name]}: {name} is {shape}, but SGLang expects {[shape[0], shape[2], shape[1]]}, as the published "
            "checkpoints have it: transformers' save_pretrained transposes experts; save them transposed back"
        )
