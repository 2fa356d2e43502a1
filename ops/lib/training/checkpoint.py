"""Checkpoints of a training under its work folder: everything for a resume with the same bytes.

    checkpoint-00000050/    the folder's name is the number of finished steps
        state.safetensors   model.<name> of all but frozen parameters, optimizer.<name>.<key>, ema.<name>, history
        state.json          {"format", "step", "identity", "counters", "ema_updates", "measured", "best": {"step",
                            "metric"} or null, "sha256"}

Tensors are whole, so a checkpoint does not depend on the number of ranks. No generator states: anchors and order are
functions of (seed, epoch, sample). A checkpoint is written under another name and renamed, so a folder of that name was
complete; sha256, that of state.safetensors, shows whether it still is. One that names an earlier one as the best is
usable only together with it, whose weights may be the training's result. A thread writes while the steps continue.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from attrs import Factory, asdict, define, frozen
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dsl.errors import ConfigError, DataError
from dsl.files import sync
from ops.lib.data.background_writer import BackgroundWriter
from ops.lib.data.files import read_json, write_json
from ops.lib.training.dtensors import gathered, load_whole, reshard
from ops.lib.training.optimizer import Optimizer, named_state, restore_state
from ops.lib.training.rank_group import is_first
from ops.lib.training.weights import Ema

FORMAT = 3
REMEDIES = "restore it, or remove the checkpoints to start again"


@frozen
class Best:
    """The step with the lowest metric, and that metric; of equal ones the earlier step."""

    step: int
    metric: float


@define
class TrainState:
    """The state of a training that changes from step to step.

    history: a row for each step, float64. counters: other counts. measured: JSON objects with measurements after some
    steps. best: the step with the lowest metric so far. Parameters and optimizer moments may be DTensors.
    """

    model: nn.Module
    optimizer: Optimizer
    history: list[Tensor]
    ema: Ema | None = None
    counters: dict[str, int] = Factory(dict)
    measured: list[dict[str, Any]] = Factory(list)
    best: Best | None = None

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return len(self.history)


class Checkpoints:
    """The checkpoints of a training; every rank creates one and calls the same methods in the same order.

    A step waits only for the copy to host memory. Rank 0 keeps at most one such copy until it is written. A write error
    is raised on rank 0 by the next call. Leaving the context finishes the write; if it ends with an error, a failed
    write is printed as well. keep: as in `write_checkpoint`.
    """

    def __init__(
        self,
        work_dir: Path,
        identity: Mapping[str, Any],
        *,
        rank: int,
        keep: int = 2,
        info: Callable[[str], None] = print,
    ) -> None:
        self.work_dir = work_dir
        self.identity = identity
        self.keep = keep
        self._info = info
        self._writes = rank == 0
        self._writer = BackgroundWriter("checkpoint")
        self._saved: int | None = None  # the step of the newest checkpoint

    def load(self, state: TrainState) -> bool:
        """Restore the newest intact checkpoint; False if there is none. See load_checkpoint."""
        found = load_checkpoint(self.work_dir, state, self.identity, self._info)
        if found:
            self._saved = state.step
        return found

    def resume(self, state: TrainState, total: int, every: int, *, started_before: bool) -> None:
        """Load the newest checkpoint as `load` does, and log where a repeated attempt starts.

        total: steps of the training.
        """
        if self.load(state):
            self._info(f"goes on from the checkpoint at step {state.step} of {total}")
        elif started_before:
            self._info(f"no checkpoint yet (checkpoint_every = {every}): starts at step 0")

    def save(self, state: TrainState, metric: float | None = None) -> None:
        """Copy the state once the previous write is done, and start to write it.

        metric: measured at this step; the lowest marks the best checkpoint. A saved step is not written again unless a
        metric is given.
        """
        self._writer.wait()
        if metric is not None:
            note_metric(state, metric)
        if state.step == self._saved and metric is None:
            return
        tensors = snapshot(state, copy=self._writes)
        self._saved = state.step
        if self._writes:
            content = content_of(state, self.identity)
            name = f"the checkpoint of step {state.step}"
            self._writer.start(name, write_checkpoint, self.work_dir, tensors, content, self.keep)

    def wait(self) -> None:
        """Wait on every rank until the saved state is on disk."""
        self._writer.wait()
        if dist.is_initialized():
            dist.barrier()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)


def snapshot(state: TrainState, copy: bool = True) -> dict[str, Tensor]:
    """A copy of all tensors of a state in host memory; empty without `copy`. All ranks must call it."""
    reshard(state.model)
    copied = {}
    for name, tensor in _tensors(state):
        whole = gathered(tensor)
        if copy:
            copied[name] = whole.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copied


def note_metric(state: TrainState, metric: float) -> None:
    """Record the metric of this step; a metric that is not finite is never the best."""
    if math.isfinite(metric) and (state.best is None or metric < state.best.metric):
        state.best = Best(state.step, metric)


def content_of(state: TrainState, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The content of state.json, without the digest."""
    return {
        "format": FORMAT,
        "step": state.step,
        "identity": json.loads(json.dumps(identity)),
        "counters": dict(state.counters),
        "ema_updates": state.ema.updates if state.ema else None,
        "measured": list(state.measured),
        "best": None if state.best is None else asdict(state.best),
    }


def write_checkpoint(work_dir: Path, tensors: Mapping[str, Tensor], content: Mapping[str, Any], keep: int) -> None:
    """Write a checkpoint atomically and durably. Old ones are removed, except the last `keep` and the best ones that
    they name.

    content: the JSON part, with the step.
    """
    place = _place(work_dir, content["step"])
    unfinished = place.with_suffix(".tmp")
    for leftover in (*work_dir.glob("checkpoint-*.tmp"), *work_dir.glob("checkpoint-*.old")):
        shutil.rmtree(leftover)
    unfinished.mkdir(parents=True)
    save_file(dict(tensors), unfinished / "state.safetensors")
    write_json(unfinished / "state.json", {**content, "sha256": _digest(unfinished / "state.safetensors")})
    for path in (*unfinished.iterdir(), unfinished):
        sync(path)
    if place.exists():
        _remove(place)
    unfinished.rename(place)
    sync(work_dir)
    written = checkpoints(work_dir)
    best = {_best_step(folder) for folder in written[-keep:]}
    for old in written[:-keep]:
        if checkpoint_step(old) not in best:
            _remove(old)


def _remove(folder: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that a half-removed folder never looks like a checkpoint."""
    old = folder.with_suffix(".old")
    folder.rename(old)
    shutil.rmtree(old)


def checkpoints(work_dir: Path) -> list[Path]:
    """The folders of finished checkpoints, the newest last."""
    return sorted(path for path in work_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d{8}", path.name))


def _place(work_dir: Path, step: int) -> Path:
    return work_dir / f"checkpoint-{step:08d}"


def checkpoint_step(folder: Path) -> int:
    """The finished steps of a checkpoint, by its folder's name."""
    return int(folder.name.removeprefix("checkpoint-"))


def with_its_best(work_dir: Path, step: int) -> list[Path]:
    """The folders of a checkpoint and of the best one that it names, the newest last."""
    folder = _place(work_dir, step)
    best = _best_step(folder)
    return [*([] if best is None or best == step else [_place(work_dir, best)]), folder]


def saved_weights(work_dir: Path, state: TrainState, step: int) -> dict[str, Tensor]:
    """The model's weights in the checkpoint of a step, or their average if the state has one; unsharded, by name.

    Raises DataError if the checkpoint was altered.
    """
    folder = _place(work_dir, step)
    damage = _damage(folder)
    if damage is not None:
        raise DataError(f"{folder}: the weights of the selected step cannot be read: {damage}; {REMEDIES}")
    prefix = "ema." if state.ema else "model."
    with safe_open(folder / "state.safetensors", framework="pt") as saved:
        return dict(_Saved(saved, prefix))


def load_checkpoint(
    work_dir: Path, state: TrainState, identity: Mapping[str, Any], info: Callable[[str], None] = print
) -> bool:
    """Restore the newest intact checkpoint; False if there is none. All ranks must call it.

    A damaged one is renamed to *.damaged with a message, and an earlier one is used. Raises DataError if every intact
    one lacks the best checkpoint that it names, and ConfigError for a checkpoint of another training, naming the
    differences.
    """
    step = _agreed(_newest_whole(work_dir, info) if is_first() else -1, next(state.model.parameters()).device)
    if step < 0:
        return False
    folder = _place(work_dir, step)
    content = read_json(folder / "state.json")
    now = {"format": FORMAT, "identity": json.loads(json.dumps(identity))}
    found = differences({key: content[key] for key in now}, now)
    if found:
        listed = "\n".join(
            f"  {path.removeprefix('identity.')}: {json.dumps(then)} then, {json.dumps(new)} now"
            for path, then, new in found
        )
        raise ConfigError(f"{folder}: the checkpoint belongs to another training:\n{listed}\nremove it to start again")
    with safe_open(folder / "state.safetensors", framework="pt") as saved:
        _restore(state, _Saved(saved, "model."), _Saved(saved, "optimizer."), _Saved(saved, "ema."))
        state.history[:] = saved.get_tensor("history").clone().unbind()
    state.counters.clear()
    state.counters.update(content["counters"])
    state.measured[:] = content["measured"]
    state.best = None if content["best"] is None else Best(**content["best"])
    if state.ema:
        state.ema.updates = content["ema_updates"]
    return True


class _Saved(Mapping[str, Tensor]):
    """The tensors of an open file whose names begin with a prefix, under the names without it.

    Each is read on access and not cached, so that a rank holds one whole tensor at a time.
    """

    def __init__(self, file: Any, prefix: str) -> None:
        self._file = file
        names = file.keys()
        self._names = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(self._names[name])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _restore(
    state: TrainState, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], ema: Mapping[str, Tensor]
) -> None:
    reshard(state.model)
    for name, parameter in _trained(state.model):
        load_whole(parameter, model[name])
    restore_state(state.optimizer, state.model, optimizer)
    for name, average in state.ema.weights.items() if state.ema else ():
        load_whole(average, ema[name])


def _tensors(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a state under their names in the file, in the same order on every rank."""
    for name, parameter in _trained(state.model):
        yield f"model.{name}", parameter
    for name, tensor in named_state(state.optimizer, state.model).items():
        yield f"optimizer.{name}", tensor
    for name, average in state.ema.weights.items() if state.ema else ():
        yield f"ema.{name}", average
    yield "history", torch.stack(state.history) if state.history else torch.zeros(0, 0, dtype=torch.float64)


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are not frozen, by name; frozen ones never change, and are not saved."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _newest_whole(work_dir: Path, info: Callable[[str], None]) -> int:
    """The step of the newest usable checkpoint, -1 without one; damaged ones are renamed.

    Raises DataError, and changes nothing, if that would discard a whole checkpoint because its best one is missing.
    """
    found = checkpoints(work_dir)
    left_out: list[tuple[Path, str]] = []
    lacking: list[tuple[Path, str]] = []
    for folder in reversed(found):
        damage = _damage(folder)
        lack = _lack(folder) if damage is None else None
        if damage is None and lack is None:
            break
        left_out.append((folder, damage or str(lack)))
        lacking += [] if lack is None else [(folder, lack)]
    resumed = found[: len(found) - len(left_out)]
    if lacking and not resumed:
        folder, lack = lacking[0]
        raise DataError(f"{folder}: the checkpoint is whole, but {lack}; {REMEDIES}")
    for index, (folder, damage) in enumerate(left_out, start=1):
        aside = folder.with_suffix(".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        then = f"trying {found[-index - 1].name}" if index < len(found) else "starting again"
        info(f"{aside}: skipped a damaged checkpoint, {damage}; {then}")
    return checkpoint_step(resumed[-1]) if resumed else -1


def _damage(folder: Path) -> str | None:
    """A text on what is wrong with a checkpoint's own files; None if intact. Other formats are not checked."""
    if not folder.exists():
        return "it is missing"
    content = _content(folder)
    if content is None or "format" not in content:
        return "state.json cannot be read"
    if content["format"] != FORMAT:
        return None
    if not (folder / "state.safetensors").is_file():
        return "state.safetensors is missing"
    if _digest(folder / "state.safetensors") != content.get("sha256"):
        return "state.safetensors was altered"
    return None


def _lack(folder: Path) -> str | None:
    """A text on what is wrong with the best checkpoint that this one names; None if it is intact."""
    step = _best_step(folder)
    if step is None or step == checkpoint_step(folder):
        return None
    best = _place(folder.parent, step)
    damage = _damage(best)
    return None if damage is None else f"{best.name}, the best before it, can no longer be read: {damage}"


def _best_step(folder: Path) -> int | None:
    """The step that a checkpoint names as the best; None if it is unreadable or of another format."""
    content = _content(folder)
    if content is None or content.get("format") != FORMAT or content["best"] is None:
        return None
    return int(content["best"]["step"])


def _content(folder: Path) -> dict[str, Any] | None:
    """The content of a checkpoint's state.json; None if it is missing or no JSON object."""
    try:
        content = read_json(folder / "state.json")
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _agreed(step: int, device: torch.device) -> int:
    """The first rank's step, on every rank, so that all use the same folder."""
    if not dist.is_initialized():
        return step
    agreed = torch.tensor(step, device=device)
    dist.broadcast(agreed, src=0)
    return int(agreed)


def differences(one: Any, other: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """All leaves that differ between two JSON values, as path and both values."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return [] if one == other else [(path, one, other)]
    found = []
    for key in sorted(one.keys() | other.keys()):
        found += differences(one.get(key), other.get(key), f"{path}.{key}" if path else key)
    return found
