"""Drafts from disk and by chance."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from dsl.errors import DataError
from ops.dflash.config import DraftConfig, from_serving
from ops.dflash.model import DraftModel
from ops.files import read_json


def load_draft(directory: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> DraftModel:
    """The draft of a serving directory, frozen.

    Raises DataError where a tensor is missing, left over or of another shape: an engine that loads such a draft says
    nothing and accepts next to nothing of what it proposes.
    """
    draft = DraftModel(from_serving(read_json(directory / "config.json")))
    try:
        draft.load_state_dict(load_file(directory / "model.safetensors"), strict=True)
    except RuntimeError as error:
        raise DataError(f"{directory / 'model.safetensors'} does not fit its config.json: {error}") from error
    return draft.to(device, dtype).eval().requires_grad_(False)


def random_draft(config: DraftConfig, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> DraftModel:
    """A draft of the same shape with random weights: the floor that any trained draft must beat."""
    draft = DraftModel(config)
    draft.initialise(seed)
    return draft.to(device, dtype).eval().requires_grad_(False)
