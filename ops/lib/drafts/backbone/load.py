"""Drafts from disk, and with random weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from dsl.errors import DataError
from ops.lib.data.files import read_object
from ops.lib.drafts.backbone.config import DraftConfig, contract_part, from_serving, optional_part
from ops.lib.drafts.backbone.hooks import added_parameters
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.training.dtensors import load_whole

CONFIG, WEIGHTS = "config.json", "model.safetensors"
Stored = Mapping[str, tuple[tuple[int, ...], str]]  # name -> shape, safetensors dtype


def load_draft(directory: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> DraftModel:
    """Load the draft of a serving directory, without gradients.

    Raises ConfigError for an invalid config.json, and DataError where a file is missing or damaged, or a tensor is
    missing, unexpected or of another shape. An engine would load such a draft silently, and then accept almost none of
    its proposals.
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
        return read_object(path)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None


def import_record(directory: Path) -> Mapping[str, Any] | None:
    """The record that `load_draft` wrote about a draft trained elsewhere; None for others. Raises as `read_config`."""
    record = read_config(directory).get("dflow")
    imported = record.get("imported") if isinstance(record, Mapping) else None
    return imported if isinstance(imported, Mapping) else None


def read_weights(directory: Path) -> dict[str, Tensor]:
    """The tensors of a draft, by their names in the contract, whichever engine it was exported for.

    Without a readable config, whose reader says so, they keep the file's. Raises DataError where the file is missing
    or damaged.
    """
    path = directory / WEIGHTS
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except SafetensorError as error:
        raise DataError(f"{path} is damaged: {error}") from error
    try:
        config = read_config(directory)
    except DataError:
        return dict(tensors)
    own_name = optional_part(config, "contract_name", str)
    found = {own_name(name): tensor for name, tensor in tensors.items()}
    if len(found) < len(tensors):
        twice = ", ".join(sorted(name for name in tensors if own_name(name) != name and own_name(name) in tensors))
        raise DataError(f"{path}: {twice}: the same tensor is there under another name, too; write the export again")
    return found


def stored_tensors(path: Path) -> Stored:
    """Shape and dtype of every tensor, from the file's header. Raises DataError for a truncated or damaged file."""
    try:
        with safe_open(path, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (no mapping)
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise DataError(f"cannot be read ({error})") from error


def tensors_digest(path: Path) -> str:
    """The sha256 of name, dtype, shape and bytes of every tensor, in the order of the names."""
    digest = hashlib.sha256()
    with safe_open(path, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def random_draft(config: DraftConfig, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> DraftModel:
    """A draft of the same shape with random weights: the floor that any trained draft must beat."""
    draft = DraftModel(config)
    draft.initialise(seed)
    return draft.to(device, dtype).eval().requires_grad_(False)


def load_weights(model: DraftModel, directory: Path) -> None:
    """Load the weights of an exported draft or a DraftCheckpoint into a model to be trained (a warm start).

    Of what an algorithm adds to the backbone, tensors that the directory lacks stay as they start, and those that the
    model lacks are dropped. The model may be sharded, and keeps its dtype. `conflicts` of train_dflash has already
    compared the configs. Raises DataError where files or tensors are missing, unexpected or
    damaged.
    """
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise DataError(
                f"{directory}: no {name}; a warm start needs an exported draft or the output of train_dflash"
            )
    config, added = read_config(directory), added_parameters(model)
    own_name = optional_part(config, "contract_name", str)
    of_parent = {own_name(name) for name in contract_part(config, "shapes")(config)}
    tensors = {name: tensor for name, tensor in read_weights(directory).items() if name not in of_parent - added}
    parameters = {name: each for name, each in model.named_parameters() if name not in added - of_parent}
    mistakes = [f"{name} is missing" for name in parameters if name not in tensors]
    mistakes += [f"{name} is unexpected" for name in tensors if name not in parameters]
    mistakes += [
        f"{name} must be {list(parameter.shape)}, got {list(tensors[name].shape)}"
        for name, parameter in parameters.items()
        if name in tensors and tensors[name].shape != parameter.shape
    ]
    if mistakes:
        listed = "\n".join(f"  {mistake}" for mistake in mistakes)
        raise DataError(f"{directory / WEIGHTS} does not fit its config.json:\n{listed}")
    for name, parameter in parameters.items():
        load_whole(parameter, tensors[name])
