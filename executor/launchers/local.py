"""The backend of this machine: a HostRunner in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dsl.finding import Finding
from dsl.graph import GraphNode
from dsl.launch import Machine
from dsl.secrets import values_of
from executor.launchers.backend import HostsExit, StageOrder
from executor.launchers.forkserver_client import Children
from executor.launchers.host_runner import HostPart, HostRunner
from executor.launchers.stage_environment import stage_environment
from executor.system.resource_pool import Capacity, Share, too_much, without_gpu


class LocalBackend:
    """Implements Backend."""

    def __init__(self, machine: Machine, children: Children) -> None:
        self._machine = machine
        self._children = children

    def capacity(self) -> Capacity:
        return Capacity.of_this_machine(self._machine)

    def check(self, nodes: Mapping[str, GraphNode]) -> list[Finding]:
        capacity = self.capacity()
        return too_much(nodes, capacity) + without_gpu(nodes, capacity)

    def start(self, order: StageOrder) -> LocalStage:
        return LocalStage(HostRunner(self._children, order, HostPart(gpus=order.share.gpus), values_of(order.secrets)))

    def prepare(self, share: Share, libraries: Sequence[str]) -> None:
        """Have a process ready for a stage of one process with this share; another stage is started without it."""
        self._children.prepare(stage_environment(share.threads, share.gpus), libraries)

    def recover(self, work: Path, go_on: Callable[[], None]) -> None:
        """The lease ends what an earlier attempt left on this machine."""

    def close(self) -> None:
        """The forkserver ends its stages."""


class LocalStage:
    """Implements RunningStage."""

    def __init__(self, runner: HostRunner) -> None:
        self._runner = runner
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        return self._runner.pid

    @property
    def is_placed(self) -> bool:
        return True

    def wait(self, seconds: float) -> HostsExit | None:
        if not self._runner.ended_within(seconds):
            return None
        if not self._is_closed:
            self._is_closed = True
            self._runner.close()
        return HostsExit(code=self._runner.code, log_errno=self._runner.log_errno)

    def request_stop(self) -> None:
        self._runner.request_stop()

    def kill(self) -> None:
        self._runner.kill()
