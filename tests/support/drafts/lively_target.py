"""A target that was not trained and yet answers with ever new tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ops.artifacts import TargetModel
from ops.lib.data.files import read_json, write_json


def make_lively(target: TargetModel, folder: Path, **info: Any) -> TargetModel:
    """A copy of a target with random weights so large that its every greedy token depends on all tokens before it.

    info: entries of target.json that differ.
    """
    shutil.copytree(target.path, folder)
    file = folder / "model" / "model.safetensors"
    weights, generator = load_file(file), torch.Generator().manual_seed(0)
    for name, weight in sorted(weights.items()):
        if weight.ndim == 2:
            scale = 0.3 if "embed_tokens" in name else 2 * weight.shape[1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    save_file(weights, file, {"format": "pt"})
    write_json(folder / "target.json", read_json(folder / "target.json") | info)
    return TargetModel(folder, "lively")
