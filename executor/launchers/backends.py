"""The backend of this machine, and which backend starts a stage, by `launch.kind`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from dsl.finding import Finding
from dsl.graph import GraphNode
from dsl.launch import Launch, Machine
from dsl.secrets import values_of
from executor.launchers.backend import Backend, StageOrder
from executor.launchers.host_run import HostRun, WaitingWorker, stage_environment
from executor.launchers.ray_backend import RayBackend
from executor.system.resource_pool import Capacity, Share, too_much, without_gpu


class Backends:
    """The backends of a run; each starts with its first stage. here: this machine's."""

    def __init__(self, machine: Machine) -> None:
        self.here = LocalBackend(machine)
        self._ray = RayBackend(machine)

    def of(self, launch: Launch) -> Backend:
        return self._ray if launch.kind == "ray" else self.here

    def room_of(self, launch: Launch) -> Backend:
        """The backend whose resources a stage uses: dflow's own cluster uses those of this machine."""
        return self.here if self._ray.is_own else self.of(launch)

    def check(self, nodes: Mapping[str, GraphNode]) -> list[Finding]:
        """Findings on what keeps these nodes from ever starting."""
        groups: dict[Backend, dict[str, GraphNode]] = {}
        for node_id, node in nodes.items():
            groups.setdefault(self.of(node.launch), {})[node_id] = node
        return [mistake for backend, group in groups.items() for mistake in backend.check(group)]

    def describe(self, launches: Iterable[Launch]) -> list[str]:
        """A line on each cluster that these launches use: what it has, and how much of that is free."""
        return [self._ray.describe()] if any(self.of(launch) is self._ray for launch in launches) else []

    def recover(self, work: Path, go_on: Callable[[], None]) -> None:
        """Return when no process of an earlier attempt in this work folder runs on any machine of its backend.

        go_on: as in `Backend.recover`.
        """
        for backend in (self.here, self._ray):
            backend.recover(work, go_on)

    def close(self) -> None:
        """End everything that the backends still run."""
        for backend in (self.here, self._ray):
            backend.close()


class LocalBackend:
    """The backend for this machine. At most one worker waits ahead, for the node that is expected to start next."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._waiting: WaitingWorker | None = None
        self._lock = threading.Lock()

    def capacity(self) -> Capacity:
        return Capacity.of_this_machine(self._machine)

    def check(self, nodes: Mapping[str, GraphNode]) -> list[Finding]:
        capacity = self.capacity()
        return too_much(nodes, capacity) + without_gpu(nodes, capacity)

    def start(self, order: StageOrder) -> HostRun:
        waiting = self._take_waiting(order.node)
        try:
            return HostRun(order, order.share.gpus, values_of(order.secrets), waiting=waiting)
        finally:
            if waiting is not None:
                waiting.close()

    def prepare(self, node: str, share: Share, libraries: Sequence[str]) -> None:
        """Start a worker that imports libraries ahead of time and waits for the node.

        share: the resources that the node will get. The kernel ends the worker with the calling thread.
        """
        environment = stage_environment(share.threads, share.gpus)
        with self._lock:
            if self._waiting is not None:
                if self._waiting.is_for(node, environment):
                    return
                self._waiting.close()
            self._waiting = WaitingWorker(node, environment, libraries)

    def recover(self, work: Path, go_on: Callable[[], None]) -> None:
        """Do nothing: the lease ends processes that an earlier attempt left on this machine."""

    def close(self) -> None:
        """End the waiting worker; a stage ends with the thread that started it."""
        with self._lock:
            if self._waiting is not None:
                self._waiting.close()
                self._waiting = None

    def _take_waiting(self, node: str) -> WaitingWorker | None:
        with self._lock:
            if self._waiting is None or self._waiting.node != node:
                return None
            waiting, self._waiting = self._waiting, None
            return waiting
