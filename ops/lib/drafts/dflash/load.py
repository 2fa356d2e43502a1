"""Drafts from disk and by chance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dsl.errors import DataError
from ops.lib.data.files import read_json
from ops.lib.drafts.dflash.config import DraftConfig, from_serving
from ops.lib.drafts.dflash.model import DraftModel

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def load_draft(directory: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> DraftModel:
    """The draft of a serving directory, frozen.

    Raises ConfigError for a config.json that none can have, and DataError where a file is missing or damaged, and where
    a tensor is missing, left over or of another shape: an engine that loads such a draft says nothing and accepts next
    to nothing of what it proposes.
    """
    draft = DraftModel(from_serving(read_config(directory)))
    try:
        draft.load_state_dict(read_weights(directory), strict=True)
    except RuntimeError as error:
        raise DataError(f"{directory / WEIGHTS} does not fit its config.json: {error}") from error
    return draft.to(device, dtype).eval().requires_grad_(False)


def read_config(directory: Path) -> Mapping[str, Any]:
    """The config.json of a draft. Raises DataError where it is missing or holds no JSON object."""
    path = directory / CONFIG
    try:
        found = read_json(path)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8: {error.reason} at byte {error.start}") from None
    if not isinstance(found, Mapping):
        raise DataError(f"{path} holds no JSON object")
    return found


def read_weights(directory: Path) -> dict[str, Tensor]:
    """The tensors of a draft. Raises DataError where the file is missing or damaged."""
    path = directory / WEIGHTS
    try:
        return dict(load_file(path))
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except SafetensorError as error:
        raise DataError(f"{path} is damaged: {error}") from error


def random_draft(config: DraftConfig, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> DraftModel:
    """A draft of the same shape with random weights: the floor that any trained draft must beat."""
    draft = DraftModel(config)
    draft.initialise(seed)
    return draft.to(device, dtype).eval().requires_grad_(False)
