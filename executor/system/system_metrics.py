"""Resource use of a stage's processes, sampled on the host that runs them; MLflow shows it as system metrics.

The first sample is taken after half a second; the pause then doubles up to ten seconds.

Of the processes: CPU time in per cent of one core, and resident memory. Of the GPUs: load, memory and power, as
NVIDIA's driver reports them. The record keeps them as events of their own kind: they are not metrics of the node, so no
comparison or table includes them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from attrs import define, field, frozen

from executor.system.hardware import gpu_indices, nvml

FIRST_S, EVERY_S = 0.5, 10.0
MB = 1e6
# Name of the metric in MLflow -> its reading from NVIDIA's library and a GPU's handle.
READINGS: dict[str, Callable[[Any, Any], float]] = {
    "utilization_percentage": lambda library, handle: library.nvmlDeviceGetUtilizationRates(handle).gpu,
    "memory_usage_megabytes": lambda library, handle: library.nvmlDeviceGetMemoryInfo(handle).used / MB,
    "power_usage_watts": lambda library, handle: library.nvmlDeviceGetPowerUsage(handle) / 1000,
}


@frozen
class Used:
    """The resource use of one process. seconds: CPU time since its start. memory: resident bytes."""

    seconds: float
    memory: int


@define
class Watched:
    """A running stage whose resource use is sampled. pid: of its root process."""

    pid: int
    since: float = field(factory=time.monotonic)  # time of the last sample
    used: Mapping[int, Used] = field(factory=dict)  # by process, at the last sample
    pause: float = FIRST_S

    def sample(self, now: float, used: Mapping[int, Used]) -> dict[str, float]:
        """The metrics of a stage's processes since the last sample."""
        known = [self.used[pid].seconds if pid in self.used else 0.0 for pid in used]
        seconds = sum(each.seconds for each in used.values()) - sum(known)
        memory = sum(each.memory for each in used.values())
        metrics = {"memory_usage_megabytes": memory / MB} if memory else {}  # 0: all have just ended
        if self.pid in used:
            metrics["cpu_utilization_percentage"] = 100 * seconds / max(now - self.since, 0.001)
        self.since, self.used = now, used
        self.pause = min(2 * self.pause, EVERY_S)
        return metrics


class Usage(threading.Thread):
    """A thread that reports the resource use of a stage until `close`. gpus: the devices it sees, None for all."""

    def __init__(self, pid: int, gpus: Sequence[str] | None, report: Callable[[Mapping[str, float]], None]) -> None:
        super().__init__(daemon=True, name="usage of a stage")
        self._pid = pid
        self._gpus = gpus
        self._report = report
        self._closed = threading.Event()
        self.start()

    def run(self) -> None:
        if self._closed.wait(FIRST_S):
            return
        watched = Watched(self._pid, used=used_below(self._pid))
        while not self._closed.wait(watched.pause):
            metrics = {**watched.sample(time.monotonic(), used_below(self._pid)), **gpu_metrics(self._gpus)}
            if metrics and not self._closed.is_set():
                self._report(metrics)

    def close(self) -> None:
        self._closed.set()


def used_below(pid: int) -> dict[int, Used]:
    """The resource use of a process and all its descendants, by process id; empty where it has ended."""
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
    """The metrics of these GPUs, named by the machine's GPU indices. gpus: None for all. Empty without a driver."""
    library = nvml()
    if library is None:
        return {}
    metrics: dict[str, float] = {}
    for name in gpu_indices() if gpus is None else gpus:
        with suppress(library.NVMLError):  # no device of that name
            handle = _handle(library, name)
            index = library.nvmlDeviceGetIndex(handle)
            for reading, read in READINGS.items():
                with suppress(library.NVMLError):  # this GPU does not report it
                    metrics[f"gpu_{index}_{reading}"] = float(read(library, handle))
    return metrics


def _handle(library: Any, name: str) -> Any:
    """The NVML handle of a GPU. name: as in CUDA_VISIBLE_DEVICES, an index or a UUID."""
    if name.isdecimal():
        return library.nvmlDeviceGetHandleByIndex(int(name))
    return library.nvmlDeviceGetHandleByUUID(name)
