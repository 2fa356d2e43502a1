"""What a checkpoint directory needs beyond transformers so that SGLang makes the same model of it."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open

from dsl.errors import DataError
from ops.lib.data.files import read_json, write_json
from ops.lib.target.ends import tensor_files
from ops.lib.target.model import read_config
from ops.lib.vision.families import Qwen3Vl, family_of, is_expert


def complete_config(directory: Path) -> None:
    """Fill in, in config.json, what serving engines read and transformers leaves out; the file stays if it is whole."""
    config = read_json(directory / "config.json")
    complete = family_of(config).for_serving()
    if complete != config:
        write_json(directory / "config.json", complete)


def check_served(directory: Path) -> None:
    """Raises DataError for a checkpoint of which SGLang makes another model than transformers does, or none."""
    family = family_of(read_config(directory))
    try:
        family.check()
        family.check_serving()
    except DataError as error:
        raise DataError(f"{directory}: {error}") from None
    if isinstance(family, Qwen3Vl):
        _check_experts(directory, family.text_config["hidden_size"])


def _check_experts(directory: Path, hidden_size: int) -> None:
    """A down projection is [experts, intermediate, hidden] where it is stored as the family's checkpoints have it."""
    files = tensor_files(directory)
    name = next((name for name in sorted(files) if is_expert(name) and name.endswith("down_proj")), None)
    if name is None:
        return
    with safe_open(files[name], framework="pt") as tensors:
        shape = tensors.get_slice(name).get_shape()
    if shape[2] != hidden_size:
        raise DataError(
            f"{files[name]}: {name} is {shape}, but SGLang expects {[shape[0], shape[2], shape[1]]}, as the published "
            "checkpoints have it: transformers' save_pretrained turns experts around; save them transposed"
        )
