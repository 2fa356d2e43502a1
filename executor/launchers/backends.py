"""Which backend starts a stage, by `launch.kind`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from dsl.finding import Finding
from dsl.graph import GraphNode
from dsl.launch import Launch, Machine
from executor.launchers.backend import Backend
from executor.launchers.forkserver_client import Children
from executor.launchers.local import LocalBackend
from executor.launchers.ray_backend import RayBackend
from executor.launchers.stage_environment import stage_environment
from executor.system.resource_pool import Share


class Backends:
    """The backends of a run; nothing is started before the first stage. here: that of this machine."""

    def __init__(self, machine: Machine) -> None:
        self._children = Children(stage_environment(1))
        self.here = LocalBackend(machine, self._children)
        self._ray = RayBackend(machine, self._children)

    def of(self, launch: Launch) -> Backend:
        return self._ray if launch.kind == "ray" else self.here

    def room_of(self, launch: Launch) -> Backend:
        """The backend whose capacity a stage takes of: a cluster of dflow's own uses this machine."""
        return self.here if self._ray.is_own else self.of(launch)

    def check(self, nodes: Mapping[str, GraphNode]) -> list[Finding]:
        """What keeps these nodes from ever starting."""
        groups: dict[Backend, dict[str, GraphNode]] = {}
        for node_id, node in nodes.items():
            groups.setdefault(self.of(node.launch), {})[node_id] = node
        return [mistake for backend, group in groups.items() for mistake in backend.check(group)]

    def prepare(self, share: Share, libraries: Sequence[str]) -> None:
        """Have a process of this machine ready for the next stage, which is expected to get this share."""
        self.here.prepare(share, libraries)

    def describe(self, launches: Iterable[Launch]) -> list[str]:
        """A line on each cluster that these use: what it has, and what of that is free."""
        return [self._ray.describe()] if any(self.of(launch) is self._ray for launch in launches) else []

    def recover(self, work: Path, go_on: Callable[[], None]) -> None:
        """Return when no process of an earlier attempt in this work folder runs on any machine of its backend.

        go_on: as in `Backend.recover`.
        """
        for backend in (self.here, self._ray):
            backend.recover(work, go_on)

    def close(self) -> None:
        """End what still runs."""
        self._children.close()
        for backend in (self.here, self._ray):
            backend.close()
