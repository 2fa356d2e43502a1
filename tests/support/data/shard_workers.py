"""Workers that share the shards of a stage, as a test's processes: run to the end, or killed at a point of work."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from fake_stage import FakeStage

from ops.lib.data import shared_shards
from ops.lib.data.shared_shards import ARTIFACT, SharedShards

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [__name__, "ops.capture_targets.run", "ops.regenerate_answers.run", "ops.tokenize_chat.run"]
)
TIMEOUT_S = 400.0
KILLED = -signal.SIGKILL
# Where a worker is killed: (module and name of a function, the call at whose begin it is killed).
Point = tuple[str, int]


def run_workers(
    run: str,
    config: Any,
    folder: Path,
    inputs: Mapping[str, Any],
    workers: int,
    dies: Mapping[int, Point] | None = None,
    constants: Mapping[str, Any] | None = None,
) -> list[int]:
    """Run `module:function` in `workers` processes below `folder` until all have ended; returns their exit codes.

    dies: where workers are killed. The others begin once each of those has claimed as many shards as it needs to reach
    that point, or the artifact. constants: "module:NAME" -> value. Raises TimeoutError.
    """
    given = (run, config, folder, inputs, workers, dies or {}, constants or {})
    processes = [PROCESSES.Process(target=_work, args=(number, *given)) for number in range(workers)]
    try:
        for process in processes:
            process.start()
        _watch(processes, folder)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [process.exitcode or 0 for process in processes]


def _watch(processes: list[BaseProcess], folder: Path) -> None:
    """Mark killed processes as lost, as a launcher does; return when all have ended, or one has failed."""
    end = time.monotonic() + TIMEOUT_S
    while any(process.is_alive() for process in processes):
        for number, process in enumerate(processes):
            if process.exitcode == KILLED:
                (folder / f"lost-{number}").touch()
            elif process.exitcode:
                return
        if time.monotonic() > end:
            raise TimeoutError(f"workers in {folder} are not done after {TIMEOUT_S:.0f} s")
        time.sleep(0.02)


def _work(
    number: int,
    run: str,
    config: Any,
    folder: Path,
    inputs: Mapping[str, Any],
    workers: int,
    dies: Mapping[int, Point],
    constants: Mapping[str, Any],
) -> None:
    torch.set_num_threads(1)
    shared_shards.POLL_S = 0.02
    for name, value in constants.items():
        module, _, constant = name.partition(":")
        setattr(importlib.import_module(module), constant, value)
    stage = FakeStage(folder, inputs, worker=number, workers=workers)
    if number in dies:
        _kill_at(*dies[number])
    elif dies:
        _let_begin(stage, dies)
    module, _, function = run.partition(":")
    getattr(importlib.import_module(module), function)(config, stage)


def _kill_at(name: str, call: int) -> None:
    module, _, path = name.partition(":")
    *owners, attribute = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    function, calls = getattr(owner, attribute), []

    def killed(*given: Any, **named: Any) -> Any:
        calls.append(given)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **named)

    setattr(owner, attribute, killed)


def _let_begin(stage: FakeStage, dies: Mapping[int, Point]) -> None:
    """Wait, before the first claim of a shard or of the artifact, for the workers that are killed."""
    claim, waited = SharedShards._claim, set()

    def later(self: SharedShards, name: str) -> bool:
        kind = name if name == ARTIFACT else "shard"
        while kind not in waited and not all(_is_served(stage, *each, kind) for each in dies.items()):
            time.sleep(0.01)
        waited.add(kind)
        return claim(self, name)

    SharedShards._claim = later  # type: ignore[method-assign]


def _is_served(stage: FakeStage, number: int, dies: Point, kind: str) -> bool:
    """Whether a worker that is killed has claimed what it needs to reach that point, or is lost."""
    needed = 1 if kind == ARTIFACT else dies[1]
    links = [link for link in stage.shared_dir.iterdir() if link.is_symlink()]
    owned = [link for link in links if (link.name.startswith(f"{ARTIFACT}.") == (kind == ARTIFACT))]
    own = [link for link in owned if link.readlink().name == str(number)]
    return number in stage.lost_workers() or len(own) >= needed
