"""Checkpoints of a training under its work folder: everything for a resume that gives the same bytes.

    checkpoint-00000050/    the folder's name is the number of finished steps
        state.safetensors   model.<name>, optimizer.<name>.<key>, history
        state.json          {"format", "step", "identity"}

No generator states: anchors and order are functions of (seed, epoch, sample). A checkpoint is written beside its
place and renamed, so a folder of that name is always complete. The last two are kept.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import define
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsl.errors import ConfigError
from ops.dflash.model import DraftModel
from ops.files import read_json, sync, write_json

FORMAT = 1
KEEP = 2


@define
class TrainState:
    """What changes from step to step. history: one row a step, float64 (see run.py)."""

    model: DraftModel
    optimizer: torch.optim.AdamW
    history: list[Tensor]

    @property
    def step(self) -> int:
        """Finished steps."""
        return len(self.history)


def save_checkpoint(work_dir: Path, state: TrainState, identity: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically, and remove all but the last two."""
    place = work_dir / f"checkpoint-{state.step:08d}"
    unfinished = place.with_suffix(".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file(_tensors(state), unfinished / "state.safetensors")
    content = {"format": FORMAT, "step": state.step, "identity": identity}
    write_json(unfinished / "state.json", content)
    for path in (*unfinished.iterdir(), unfinished):
        sync(path)
    shutil.rmtree(place, ignore_errors=True)
    unfinished.rename(place)
    sync(work_dir)
    for old in _checkpoints(work_dir)[:-KEEP]:
        shutil.rmtree(old)


def load_checkpoint(work_dir: Path, state: TrainState, identity: Mapping[str, Any]) -> bool:
    """Bring the state to the newest checkpoint; False where there is none.

    Raises ConfigError for a checkpoint of another training, naming what differs.
    """
    found = _checkpoints(work_dir)
    if not found:
        return False
    content = read_json(found[-1] / "state.json")
    differences = _differences(content["identity"], json.loads(json.dumps(identity)))
    if content["format"] != FORMAT or differences:
        listed = "\n".join(f"  {line}" for line in differences) or f"  format: {content['format']}, now {FORMAT}"
        raise ConfigError(
            f"{found[-1]}: the checkpoint is that of another training:\n{listed}\nremove it to start anew"
        )
    tensors = load_file(found[-1] / "state.safetensors")
    state.model.load_state_dict(_below(tensors, "model."))
    saved = state.optimizer.state_dict()
    names = _parameter_names(state)
    saved["state"] = {
        index: entries for index, name in enumerate(names) if (entries := _below(tensors, f"optimizer.{name}."))
    }
    state.optimizer.load_state_dict(saved)
    state.history[:] = tensors["history"].unbind()
    return True


def _tensors(state: TrainState) -> dict[str, Tensor]:
    tensors = {f"model.{name}": tensor for name, tensor in state.model.state_dict().items()}
    entries = state.optimizer.state_dict()["state"]
    for index, name in enumerate(_parameter_names(state)):
        tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in entries.get(index, {}).items()}
    tensors["history"] = torch.stack(state.history) if state.history else torch.zeros(0, 0, dtype=torch.float64)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _parameter_names(state: TrainState) -> list[str]:
    """The names of the optimizer's parameters in the order of its own numbering."""
    name_of = {id(parameter): name for name, parameter in state.model.named_parameters()}
    return [name_of[id(parameter)] for group in state.optimizer.param_groups for parameter in group["params"]]


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _checkpoints(work_dir: Path) -> list[Path]:
    return sorted(path for path in work_dir.glob("checkpoint-*") if path.suffix != ".tmp")


def _differences(then: Any, now: Any, path: str = "") -> list[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        lines = []
        for key in sorted(then.keys() | now.keys()):
            lines += _differences(then.get(key), now.get(key), f"{path}.{key}" if path else key)
        return lines
    return [] if then == now else [f"{path}: {json.dumps(then)} then, {json.dumps(now)} now"]
