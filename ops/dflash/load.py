"""Drafts from disk and by chance."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from ops.dflash.config import DraftConfig, from_serving
from ops.dflash.model import DraftModel
from ops.files import read_json


def load_draft(directory: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> DraftModel:
    """The draft of a serving directory, frozen; every tensor must be there and none may be left over."""
    draft = DraftModel(from_serving(read_json(directory / "config.json")))
    draft.load_state_dict(load_file(directory / "model.safetensors"), strict=True)
    return draft.to(device, dtype).eval().requires_grad_(False)


def random_draft(config: DraftConfig, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> DraftModel:
    """A draft of the same shape with random weights: the floor that any trained draft must beat."""
    draft = DraftModel(config)
    draft.initialise(seed)
    return draft.to(device, dtype).eval().requires_grad_(False)
