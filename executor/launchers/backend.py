"""The seam between a stage and what it runs on: this machine (backends.py), or a Ray cluster (ray_backend.py).

A backend starts the parts of a stage, each on one host, and says how they ended. A part's processes are a HostRun
(host_run.py), on other hosts within a RemoteHost; ExitsByHost decides what the end of one means for the others (both in
hosts.py). Everything else about a stage is the same for all backends: its files (stage_contract.py), its log,
the cause of a failure (stage_process.py). docs/architecture.md says how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from attrs import frozen

from dsl.convert import structure, unstructure
from dsl.files import read_json_or_none, write_json
from dsl.finding import Finding
from dsl.graph import GraphNode
from dsl.launch import Launch
from executor.system.resource_pool import Capacity, Demand, Share


@frozen(kw_only=True)
class StageOrder:
    """The instructions for a backend to start a stage. All paths are absolute, and the same on all hosts.

    job, job_digest: the StageSpec file, with a name unique to the attempt. folder: the stage's work folder. results:
    the folder for results and exits. events: the run's log. attempt: its number in this run. private: a folder of the
    attempt that only this user may enter. log: the log of host 0; those of other hosts lie beside it (`host_log`).
    share: threads of each process, and this machine's devices for the stage. part: resources of each of `launch.parts`
    on its host. secrets: variables whose values no log may show.
    """

    node: str
    job: Path
    job_digest: str
    folder: Path
    results: Path
    events: Path
    attempt: int
    private: Path
    log: Path
    directory: Path
    launch: Launch
    share: Share
    part: Demand
    secrets: tuple[str, ...] = ()


@frozen(kw_only=True)
class HostExit:
    """The exit of a stage's processes, on one host or on all.

    code: 0 where all succeeded, else the first other exit code, or minus a signal's number; None where unknown. error:
    why the stage could not run there. log_errno: errno of a failed write of the redacted log, 0 if none. hosts: the
    names of several hosts. lost: which hosts left, and why. failed: which host failed, where no rank says why.
    """

    code: int | None
    error: str = ""
    log_errno: int = 0
    hosts: tuple[str, ...] = ()
    lost: str = ""
    failed: str = ""

    @classmethod
    def read(cls, path: Path) -> HostExit | None:
        data = read_json_or_none(path)
        return None if data is None else structure(cls, data)

    def write(self, path: Path) -> None:
        write_json(path, unstructure(self))


class RunningStage(Protocol):
    """The processes of a stage on all its hosts; they never outlive the executor.

    One thread waits. Another may call request_stop and kill at any time, even before the first process starts or after
    the last has ended. These calls return at once.
    """

    @property
    def is_placed(self) -> bool:
        """Whether the stage has room to run; `launch.timeout` counts from that moment on."""

    def wait(self, seconds: float) -> HostExit | None:
        """Wait for the stage to end, and return how it did; None where it still runs after `seconds`."""

    def request_stop(self) -> None:
        """Send SIGTERM to every rank; called once. Ranks then save their progress, which may take minutes."""

    def kill(self) -> None:
        """Send SIGKILL to every process of the stage; may be called many times."""


class Backend(Protocol):
    """An interface that starts stages, on this machine or on a cluster. Thread-safe."""

    def capacity(self) -> Capacity:
        """The resources that the stages of a run may use together. Raises StageError where these are unknown."""

    def check(self, nodes: Mapping[str, GraphNode]) -> list[Finding]:
        """Findings on what keeps these nodes from ever starting, before anything runs."""

    def start(self, order: StageOrder) -> RunningStage:
        """Start a stage, and return at once: waiting for room, or for the backend's own start, happens in `wait`."""

    def recover(self, work: Path, go_on: Callable[[], None]) -> None:
        """Return when no process of an earlier attempt in this work folder runs on another machine.

        go_on: called while it waits; may raise StopRequested. Raises LeaseLost where such processes cannot be ended,
        and ClusterError where that is unknown.
        """

    def close(self) -> None:
        """End everything that the backends still run."""


def exits_path(results: Path, host: int) -> Path:
    """The file where the parent of the ranks of a host writes which of them failed."""
    return results / f"exits-{host}.json"


def host_log(log: Path, host: int) -> Path:
    """The log file of a host: the stage's log for host 0, a file beside it for other hosts."""
    return log.with_name(f"{log.stem}.host-{host}{log.suffix}") if host else log
