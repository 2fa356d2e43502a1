"""The two ends of a target, its embedding and its lm_head, read from the files of a checkpoint.

V vocabulary, M hidden size of the target
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsl.errors import DataError
from ops.artifacts import TargetModel
from ops.lib.data.files import read_json
from ops.lib.target.checkpoint_files import weight_files

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # by safetensors


def frozen_ends(
    target: TargetModel, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The weights of embedding and lm_head, [V, M] each; nothing else of the checkpoint is read.

    They are copied from the file's pages to the device and cast there, without host memory of the rank.
    """
    info: Mapping[str, Any] = read_json(target.path / "target.json")
    files = tensor_files(target.path / "model")

    def read(key: str) -> Tensor:
        with safe_open(files[key], framework="pt") as tensors:
            return tensors.get_tensor(key).to(device).to(dtype)

    embed = read(info["embed_key"])
    head = embed if info["lm_head_key"] == info["embed_key"] else read(info["lm_head_key"])
    return embed, head


def stored_dtype(directory: Path) -> torch.dtype | None:
    """The dtype of a checkpoint's floating tensors; None for several, or for one that no computation supports."""
    found: set[str] = set()
    for file in sorted(set(tensor_files(directory).values())):
        with safe_open(file, framework="pt") as tensors:
            found |= {each.get_dtype() for each in map(tensors.get_slice, tensors.keys())}
    floating = {name for name in found if name.startswith(("F", "BF"))}
    return DTYPES.get(floating.pop()) if len(floating) == 1 else None


def tensor_files(directory: Path) -> dict[str, Path]:
    """The safetensors file of each tensor that transformers loads, by the tensor's name.

    Raises DataError if the directory has none, or a damaged one.
    """
    files = weight_files(directory)
    if not files:
        raise DataError(f"{directory}: no *.safetensors in this target directory; other formats are not supported")
    names: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                names |= dict.fromkeys(tensors.keys(), file)
        except SafetensorError as error:
            raise DataError(f"{file}: damaged or truncated ({error}); copy the checkpoint again") from error
    return names
