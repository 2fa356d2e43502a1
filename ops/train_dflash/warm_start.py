"""A training that begins with the weights of a trained draft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from dsl.errors import ConfigError, DataError
from ops.lib.data.files import read_json
from ops.lib.drafts.dflash.config import from_serving, to_serving
from ops.lib.drafts.dflash.model import DraftModel
from ops.lib.training.checkpoint import differences
from ops.lib.training.dtensors import load_whole


def load_weights(model: DraftModel, directory: Path) -> None:
    """Load a directory with config.json and model.safetensors: an exported draft or a DraftCheckpoint.

    The model may be sharded; its dtype stays, whatever the stored one is. Raises ConfigError that names what differs
    between the draft's config and the model's, and DataError where files or tensors are missing, left over or damaged.
    """
    for name in ("config.json", "model.safetensors"):
        if not (directory / name).is_file():
            raise DataError(
                f"{directory}: no {name}; a warm start needs an exported draft or the output of train_dflash"
            )
    differing = differences(_shape(read_json(directory / "config.json")), _shape(to_serving(model.config)))
    if differing:
        listed = "\n".join(
            f"  {path}: {json.dumps(there)} there, {json.dumps(here)} here" for path, there, here in differing
        )
        raise ConfigError(f"{directory}: this draft cannot start the training because its config differs:\n{listed}")
    try:
        tensors = load_file(directory / "model.safetensors")
    except SafetensorError as error:
        raise DataError(f"{directory / 'model.safetensors'} is damaged: {error}") from error
    parameters = dict(model.named_parameters())
    mistakes = [f"{name} is missing" for name in parameters if name not in tensors]
    mistakes += [f"{name} is unexpected" for name in tensors if name not in parameters]
    mistakes += [
        f"{name} must be {list(parameter.shape)}, got {list(tensors[name].shape)}"
        for name, parameter in parameters.items()
        if name in tensors and tensors[name].shape != parameter.shape
    ]
    if mistakes:
        listed = "\n".join(f"  {mistake}" for mistake in mistakes)
        raise DataError(f"{directory / 'model.safetensors'} does not fit its config.json:\n{listed}")
    for name, parameter in parameters.items():
        load_whole(parameter, tensors[name])


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without the dtype of the stored weights, as to_serving writes it."""
    return {name: value for name, value in to_serving(from_serving(config)).items() if name != "dtype"}
