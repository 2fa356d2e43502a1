"""The seam between a stage and what it runs on: this machine (local.py), or a Ray cluster (ray_backend.py).

A backend starts the ranks of a stage on one host or several, each host's by a HostRunner (host_runner.py), and says how
they ended. Everything else about a stage is the same for all backends: its files (stage_contract.py), its log, the
cause of a failure (stage_process.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from attrs import frozen

from dsl.errors import Mistake
from dsl.graph import GraphNode
from dsl.launch import Launch
from executor.system.resource_pool import Capacity, Share


@frozen(kw_only=True)
class StageOrder:
    """What a backend needs to start a stage. Paths are absolute, and the same on all hosts.

    job: the file with the StageSpec; folder: that of the stage's work; mark: the value of DFLOW_STAGE in the
    environment of every process (stage_mark.py); results: the folder for results and exits; private: a folder of this
    attempt that only this user may enter; log: of host 0, and beside it those of the others (`host_log`); share: of
    each host; secrets: the variables whose values no log may show.
    """

    node: str
    job: Path
    folder: Path
    mark: str
    results: Path
    private: Path
    log: Path
    directory: Path
    launch: Launch
    share: Share
    secrets: tuple[str, ...] = ()


@frozen(kw_only=True)
class HostsExit:
    """No process of the stage runs any more, on any host.

    code: 0 where all succeeded, else the first other exit code, or minus a signal's number; None where nobody saw it.
    hosts: their names by number, empty for one host. lost: which hosts left, and why. failed: which hosts failed, for
    where no rank reports why. log_error: why a log with redacted secrets could not be written.
    """

    code: int | None
    hosts: tuple[str, ...] = ()
    lost: str = ""
    failed: str = ""
    log_error: OSError | None = None


class RunningStage(Protocol):
    """The processes of a stage on all its hosts; they never outlive the executor."""

    @property
    def pid(self) -> int | None:
        """The process on this machine whose use of resources, with its children's, is the stage's.

        None before it is known, and for a backend whose hosts report it themselves.
        """

    def wait(self, seconds: float) -> HostsExit | None:
        """How it ended, None where it still runs after that time."""

    def request_stop(self) -> None:
        """SIGTERM, once, to every rank."""

    def kill(self) -> None:
        """SIGKILL to every process of the stage."""


class Backend(Protocol):
    """Starts stages. Thread-safe."""

    def capacity(self) -> Capacity:
        """What the stages of a run may use together."""

    def check(self, nodes: Mapping[str, GraphNode]) -> list[Mistake]:
        """What keeps these nodes from ever starting, found before anything runs."""

    def start(self, order: StageOrder) -> RunningStage:
        """Raises StageError where it cannot be started."""

    def recover(self, work: Path) -> None:
        """Return when no process of an earlier attempt in this work folder runs on another machine.

        Raises LeaseLost where that cannot be known or done.
        """

    def close(self) -> None:
        """End what still runs."""


def exits_path(results: Path, host: int) -> Path:
    """Where the parent of the ranks of a host writes which of them failed."""
    return results / f"exits-{host}.json"


def host_log(log: Path, host: int) -> Path:
    """The log of a host: that of host 0 is the stage's, the others are beside it."""
    return log.with_name(f"{log.stem}.host-{host}{log.suffix}") if host else log
