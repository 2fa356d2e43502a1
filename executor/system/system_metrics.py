"""What the processes of a running node use of this machine, read now and then: MLflow shows it as system metrics.

First when the node has been seen for half a second, then after twice the time before, at most ten seconds.

Of a node's processes, which are those that its stage has started: CPU time in per cent of one core, and resident
memory. Of the GPUs that it has: load, memory and power, as NVIDIA's driver reports them. The record keeps it as events
of their own kind: no figure of the node, so nothing compares it, and no table shows it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from attrs import define, field, frozen

from executor.system.hardware import gpu_indices, nvml

FIRST_S, EVERY_S = 0.5, 10.0
MB = 1e6
# By what the metric is called in MLflow; from NVIDIA's library and a GPU's handle there.
READINGS: dict[str, Callable[[Any, Any], float]] = {
    "utilization_percentage": lambda library, handle: library.nvmlDeviceGetUtilizationRates(handle).gpu,
    "memory_usage_megabytes": lambda library, handle: library.nvmlDeviceGetMemoryInfo(handle).used / MB,
    "power_usage_watts": lambda library, handle: library.nvmlDeviceGetPowerUsage(handle) / 1000,
}


@frozen
class Used:
    """By one process: CPU time since its start, in seconds, and resident memory in bytes."""

    seconds: float
    memory: int


@define
class Watched:
    """A node that runs: pid is that of its stage; gpus: the devices it sees, None for all of them."""

    node: str
    pid: int
    gpus: Sequence[str] | None
    since: float = field(factory=time.monotonic)  # the last look
    used: Mapping[int, Used] = field(factory=dict)  # by each process, at the last look
    pause: float = FIRST_S

    def is_due(self, now: float) -> bool:
        return now >= self.since + self.pause

    def look(self, now: float, used: Mapping[int, Used]) -> dict[str, float]:
        """The metrics of its processes since the last look."""
        known = [self.used[pid].seconds if pid in self.used else 0.0 for pid in used]
        seconds = sum(each.seconds for each in used.values()) - sum(known)
        memory = sum(each.memory for each in used.values())
        metrics = {"memory_usage_megabytes": memory / MB} if memory else {}  # none of it: all have just ended
        if self.pid in used:
            metrics["cpu_utilization_percentage"] = 100 * seconds / max(now - self.since, 0.001)
        self.since, self.used = now, used
        self.pause = min(2 * self.pause, EVERY_S)
        return metrics


class Usage(threading.Thread):
    """Looks at the nodes that `watched` names; `tell` gets the node and its metrics. Ends with `close`."""

    def __init__(
        self,
        watched: Callable[[], Iterable[tuple[str, int, Sequence[str] | None]]],
        tell: Callable[[str, Mapping[str, float]], None],
    ) -> None:
        super().__init__(daemon=True, name="usage of running nodes")
        self._watched = watched
        self._tell = tell
        self._known: dict[tuple[str, int], Watched] = {}
        self._closed = threading.Event()

    def run(self) -> None:
        while not self._closed.wait(FIRST_S):
            running = {(node, pid): gpus for node, pid, gpus in self._watched()}
            self._known = {
                place: self._known.get(place) or Watched(*place, gpus, used=used_below(place[1]))
                for place, gpus in running.items()
            }
            for each in self._known.values():
                if not each.is_due(time.monotonic()):
                    continue
                used = used_below(each.pid)
                metrics = {**each.look(time.monotonic(), used), **gpu_metrics(each.gpus)}
                if metrics:
                    with suppress(OSError):  # a full disk: the nodes have more to say about that
                        self._tell(each.node, metrics)

    def close(self) -> None:
        self._closed.set()


def used_below(pid: int) -> dict[int, Used]:
    """By the process and all that it, or one of those, has started; by process id. Empty where it has ended."""
    import psutil

    found: dict[int, Used] = {}
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended
                times = process.cpu_times()
                found[process.pid] = Used(times.user + times.system, process.memory_info().rss)
    return found


def gpu_metrics(gpus: Sequence[str] | None) -> dict[str, float]:
    """Of these GPUs, None for all of them; none without a driver. Each has the index of the machine."""
    library = nvml()
    if library is None:
        return {}
    metrics: dict[str, float] = {}
    for name in gpu_indices() if gpus is None else gpus:
        with suppress(library.NVMLError):  # no device of that name
            handle = _handle(library, name)
            index = library.nvmlDeviceGetIndex(handle)
            for reading, read in READINGS.items():
                with suppress(library.NVMLError):  # this GPU does not tell it
                    metrics[f"gpu_{index}_{reading}"] = float(read(library, handle))
    return metrics


def _handle(library: Any, name: str) -> Any:
    """name: as CUDA_VISIBLE_DEVICES has it, an index or a UUID."""
    if name.isdecimal():
        return library.nvmlDeviceGetHandleByIndex(int(name))
    return library.nvmlDeviceGetHandleByUUID(name)
