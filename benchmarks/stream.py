"""What it costs to send features from the workers of a capture pool to a training rank: GB/s, and CPU seconds per GB.

    python benchmarks/stream.py
    python benchmarks/stream.py --workers 2 --tokens 4096 --hidden 4096 --layers 5 --units 50 --json stream.json

Workers are processes that answer with the same bfloat16 features, as fast as they are asked; a rank reads them with two
units open at each worker, over unix sockets and over TCP on the loopback interface. CPU seconds are those of the rank,
and of the workers, while the units are read.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from benchmarks.harness import in_rounds, parser, save_figures, table
from benchmarks.sides.stage import FolderStage
from dsl.stage import PoolRendezvous
from ops.train_dflash.batches import Rows
from ops.train_dflash.capture_pool import OPEN_UNITS, CapturePool
from ops.train_dflash.capture_worker import serve
from ops.train_dflash.online import RowStates

SECRET = bytes(32).hex()


class WorkerStage(FolderStage):
    """A stage that runs until an event."""

    def __init__(self, folder: Path, stop: Event) -> None:
        super().__init__(folder, {})
        self._stop = stop

    def stop_requested(self) -> bool:
        return self._stop.is_set()


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def work(pool: PoolRendezvous, tokens: int, width: int, stop: Event, seconds: Any) -> None:
    """A worker's process; puts its CPU seconds since its first unit."""
    torch.set_num_threads(1)
    states = RowStates(torch.ones(tokens, width, dtype=torch.bfloat16), None)
    began: list[float] = []

    def take(_split: str, _rows: object) -> RowStates:
        began.append(cpu_seconds())
        return states

    serve(take, WorkerStage(pool.folder.parent / f"worker-{pool.name}", stop), pool, {}, torch.device("cpu"))
    seconds.put(cpu_seconds() - began[0])


def measure(options: Any, address: str) -> dict[str, float]:
    """Read the units once; {"gigabytes_per_second", "reader", "writers"}, the last two in CPU seconds per GB."""
    width = options.layers * options.hidden
    info = {
        "target_layer_ids": list(range(options.layers)),
        "hidden_size": options.hidden,
        "final_hidden": False,
        "dtype": "bfloat16",
    }
    spawn = multiprocessing.get_context("spawn")
    stop, seconds = spawn.Event(), spawn.Queue()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pool = PoolRendezvous(
            workers=options.workers, folder=folder / "pool", private=folder, address=address, secret=SECRET
        )
        workers = [
            spawn.Process(target=work, args=(evolve(pool, worker=number), options.tokens, width, stop, seconds))
            for number in range(options.workers)
        ]
        for worker in workers:
            worker.start()
        rows = [Rows(0, 0, options.tokens)]
        with CapturePool(FolderStage(folder / "rank", {}), pool, info, {"train": [options.tokens]}, {}) as client:
            while client.metrics()["stream/workers"] < options.workers:
                time.sleep(0.05)
            waits = [client.ask("train", rows) for _ in range(OPEN_UNITS * options.workers)]
            for _ in range(options.workers):
                waits.pop(0)()  # threads and memory exist
            started, used = time.perf_counter(), cpu_seconds()
            for _ in range(options.units):
                waits.append(client.ask("train", rows))
                waits.pop(0)()
            passed, read = time.perf_counter() - started, cpu_seconds() - used
            for wait in waits:
                wait()
        stop.set()
        written = sum(seconds.get() for _ in workers)
        for worker in workers:
            worker.join()
    gigabytes = options.tokens * width * 2 / 1e9
    units = options.units + OPEN_UNITS * options.workers
    return {
        "gigabytes_per_second": options.units * gigabytes / passed,
        "reader": read / (options.units * gigabytes),
        "writers": written / (units * gigabytes),
    }


def shown(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in found.items())


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    sides = {"unix": lambda: measure(options, ""), "tcp": lambda: measure(options, "127.0.0.1")}
    found = in_rounds(sides, options.rounds, shown)
    best = {name: max(each, key=lambda one: one["gigabytes_per_second"]) for name, each in found.items()}
    rows = [[name, *(f"{value:.2f}" for value in values.values())] for name, values in best.items()]
    print(table([["sockets", "GB/s", "CPU s/GB, reader", "CPU s/GB, writers"], *rows]))
    save_figures(options.json, found)
    return 0


def _options() -> Any:
    made = parser(__doc__, rounds=3)
    made.add_argument("--workers", type=int, default=1)
    made.add_argument("--tokens", type=int, default=1024, help="of a unit")
    made.add_argument("--hidden", type=int, default=4096)
    made.add_argument("--layers", type=int, default=5)
    made.add_argument("--units", type=int, default=50)
    return made.parse_args()


if __name__ == "__main__":
    sys.exit(main())
