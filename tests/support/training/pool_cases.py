"""Workers of a capture pool as processes of a test's own, some of which die, stop, fail or tear an answer.

They are forked by a server that has imported what they need once; it never computes, so forking it is safe.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from fake_stage import FakeStage

from dsl.errors import DataError
from dsl.stage import PoolRendezvous
from ops.lib.stream.frames import LENGTH, Frames
from ops.lib.stream.rendezvous import announced
from ops.train_dflash import run
from ops.train_dflash.capture_worker import serve
from ops.train_dflash.online import RowStates
from ops.train_dflash.op import TrainDflash

CPU = torch.device("cpu")
SECRET = bytes(range(32)).hex()
INFO = {"target_layer_ids": [0, 2], "hidden_size": 3, "final_hidden": True, "dtype": "bfloat16"}
LENGTHS = {"train": [5, 9, 4, 7], "val": [6]}
FACTS = {"target": "t"}


def rendezvous(folder: Path, workers: int = 1, worker: int | None = None, start: int = 0) -> PoolRendezvous:
    private = folder / "private"
    private.mkdir(mode=0o700, exist_ok=True, parents=True)
    place = {"folder": folder / "pool", "private": private}
    return PoolRendezvous(workers=workers, worker=worker, start=start, secret=SECRET, **place)


@attrs.frozen
class How:
    """How a worker behaves; numbers count its units from 1.

    after: it computes nothing before this many workers are about to be killed, so that these get their units however
    slow they are. training: the config and the inputs of a real training; None: it gives `numbered` states.
    """

    dies_in: int = 0
    tears: int = 0
    fails_in: int = 0
    stops_in: int = 0
    never_listens: bool = False
    after: int = 0
    seconds: float = 0.0
    facts: Mapping[str, Any] = FACTS
    training: tuple[TrainDflash, Mapping[str, Any]] | None = None


def numbered(split, rows):
    """States that tell split, sample and token."""
    base = {"train": 0, "val": 1000}[split]
    features = [
        torch.arange(row.first, row.last).float()[:, None].expand(-1, 6) + base + 10 * row.index for row in rows
    ]
    hidden = [torch.full((LENGTHS[split][row.index], 3), float(row.index)) for row in rows]
    return RowStates(torch.cat(features).bfloat16(), torch.cat(hidden).bfloat16())


def kill_here(place: PoolRendezvous) -> None:
    """Tell the others, and be killed."""
    (place.folder.parent / f"killed-{place.name}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def behaving(take, how: How, place: PoolRendezvous):
    units = 0

    def wrapped(split, rows):
        nonlocal units
        units += 1
        while len(list(place.folder.parent.glob("killed-*"))) < how.after:
            time.sleep(0.01)
        if units == how.dies_in:
            kill_here(place)
        if units == how.stops_in:
            os.kill(os.getpid(), signal.SIGSTOP)
        if units == how.fails_in:
            raise DataError("a shard is damaged")
        time.sleep(how.seconds)
        return take(split, rows)

    return wrapped


def torn(unit: int, place: PoolRendezvous):
    """`Frames.send` that is killed in the middle of this answer's bytes."""
    send, answers = Frames.send, 0

    def torn_send(self, head, tensors=()):
        nonlocal answers
        answers += bool(tensors)
        if answers != unit:
            return send(self, head, tensors)
        text = json.dumps(head).encode()
        data = tensors[0].view(-1).view(torch.uint8).numpy().tobytes()
        self._socket.sendall(LENGTH.pack(len(text)) + text + data[: len(data) // 2])
        return kill_here(place)

    return torn_send


class StoppedByTerm(FakeStage):
    """A worker's stage, stopped by SIGTERM as the executor does."""

    def __init__(self, *arguments: Any, **values: Any) -> None:
        super().__init__(*arguments, **values)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stop_after", 0))


def work(place: PoolRendezvous, how: How) -> None:
    """The process of a worker."""
    torch.set_num_threads(1)
    if how.never_listens:
        os.kill(os.getpid(), signal.SIGKILL)
    if how.tears:
        Frames.send = torn(how.tears, place)
    folder = place.folder.parent / f"worker-{place.name}"
    if how.training is None:
        serve(behaving(numbered, how, place), StoppedByTerm(folder, pool=place), place, how.facts, CPU)
        return
    config, inputs = how.training
    run.serve = lambda take, *rest: serve(behaving(take, how, place), *rest)
    run.train_dflash(config, StoppedByTerm(folder, inputs, pool=place))


class Workers:
    """The processes of a test's workers; `start` adds one."""

    def __init__(self, folder: Path) -> None:
        self.place = rendezvous(folder)
        self.processes: list[Any] = []
        multiprocessing.set_forkserver_preload(
            ["ops.train_dflash.run", "transformers.models.qwen3_vl.modeling_qwen3_vl", "pool_cases"]
        )

    def wait_for(self, count: int) -> None:
        """Wait until so many workers listen."""
        deadline = time.monotonic() + 120
        while len(announced(self.place)) < count:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def start(self, how: How | None = None) -> Any:
        place = attrs.evolve(self.place, worker=len(self.processes))
        process = multiprocessing.get_context("forkserver").Process(target=work, args=(place, how or How()))
        process.start()
        self.processes.append(process)
        return process


@contextmanager
def workers_of(folder: Path, *hows: How):
    """Workers that behave like this; those that still run at the end get SIGTERM, and must end."""
    workers = Workers(folder)
    try:
        for how in hows:
            workers.start(how)
        yield workers
        for process in workers.processes:
            process.terminate()
        for process in workers.processes:
            process.join(120)
            assert process.exitcode is not None
    finally:
        for process in workers.processes:
            process.kill()
