"""What the processes of a running node use of this machine, read now and then: MLflow shows it as system metrics.

First when the node is half a second old or a little more, then after twice the time before, at most ten seconds.

Of a node's processes, which are those that its stage has started: CPU time in per cent of one core, and resident
memory. Of the GPUs that it has: load, memory and power, as nvidia-smi tells them. It stands in the record as events of
their own kind: no figure of the node, so nothing compares it, and no table shows it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from attrs import define, field

FIRST_S, EVERY_S = 0.5, 10.0
GPU_QUERY = "index,utilization.gpu,memory.used,power.draw"
GPU_METRICS = ("utilization_percentage", "memory_usage_megabytes", "power_usage_watts")
MIB, MB = 1 << 20, 1e6
ANSWERS_WITHIN_S = 5.0
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@define
class Watched:
    """A node that runs: pid is that of its stage; gpus: the devices it sees, None for all of them."""

    node: str
    pid: int
    gpus: Sequence[str] | None
    since: float = field(factory=time.monotonic)  # the last look
    ticks: dict[int, int] = field(factory=dict)  # of each process, by the last look
    age: float = 0.0  # of the stage's process, when its ticks were read
    pause: float = FIRST_S

    def is_due(self, now: float) -> bool:
        return now >= self.since + self.pause

    def looked(self, now: float, ticks: dict[int, int], age: float) -> None:
        self.since, self.ticks, self.age = now, ticks, age
        self.pause = min(2 * self.pause, EVERY_S)


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
        self._has_gpus = shutil.which("nvidia-smi") is not None

    def run(self) -> None:
        while not self._closed.wait(FIRST_S):
            running = {(node, pid): gpus for node, pid, gpus in self._watched()}
            known = {place: self._known.get(place) or Watched(*place, gpus) for place, gpus in running.items()}
            self._known = known
            now = time.monotonic()
            due = [each for each in known.values() if each.is_due(now)]
            processes = read_processes() if due else {}
            for each in due:
                metrics = self._metrics(each, processes)
                if metrics:
                    with suppress(OSError):  # a full disk: the nodes have more to say about that
                        self._tell(each.node, metrics)

    def close(self) -> None:
        self._closed.set()

    def _metrics(self, each: Watched, processes: Mapping[int, Process]) -> dict[str, float]:
        own = below(each.pid, processes)
        ticks = {pid: processes[pid].ticks for pid in own}
        used = sum(count - each.ticks.get(pid, 0) for pid, count in ticks.items()) / TICKS_A_SECOND
        age = processes[each.pid].age if each.pid in own else each.age
        seconds = age - each.age
        each.looked(time.monotonic(), ticks, age)
        memory = sum(processes[pid].memory for pid in own)
        metrics = {"memory_usage_megabytes": memory / MB} if memory else {}  # none of it: all have just ended
        if each.pid in own:
            metrics["cpu_utilization_percentage"] = 100 * used / max(seconds, 0.001)
        return {**metrics, **(gpu_metrics(each.gpus) if self._has_gpus else {})}


@define
class Process:
    """parent: its process id; ticks: CPU time that it used; memory: resident bytes; age: in seconds, when these
    were read."""

    parent: int
    ticks: int
    memory: int
    age: float


def read_processes() -> dict[int, Process]:
    """All that there are, by process id. Source: proc(5), /proc/<pid>/stat."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it has ended
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                now = time.clock_gettime(time.CLOCK_BOOTTIME)
                ticks = int(fields[11]) + int(fields[12])
                found[int(folder.name)] = Process(
                    int(fields[1]), ticks, int(fields[21]) * PAGE, now - int(fields[19]) / TICKS_A_SECOND
                )
    return found


def below(pid: int, processes: Mapping[int, Process]) -> set[int]:
    """The process and all that it, or one of those, has started."""
    children: dict[int, list[int]] = {}
    for child, process in processes.items():
        children.setdefault(process.parent, []).append(child)
    found: set[int] = set()
    waiting = [pid] if pid in processes else []
    while waiting:
        found.add(last := waiting.pop())
        waiting += children.get(last, [])
    return found


def gpu_metrics(gpus: Sequence[str] | None) -> dict[str, float]:
    """Of these GPUs, None for all of them; none where nvidia-smi does not answer. Each has the index of the machine."""
    if gpus is not None and not gpus:
        return {}
    chosen = [] if gpus is None else ["-i", ",".join(gpus)]
    command = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits", *chosen]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ANSWERS_WITHIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    metrics: dict[str, float] = {}
    for line in asked.stdout.splitlines() if asked.returncode == 0 else ():
        index, *values = (value.strip() for value in line.split(","))
        for name, value in zip(GPU_METRICS, values, strict=False):
            with suppress(ValueError):  # "[N/A]": this GPU does not tell it
                factor = MIB / MB if name.startswith("memory") else 1.0
                metrics[f"gpu_{index}_{name}"] = float(value) * factor
    return metrics
