"""A stage on any backend: its files, its log, how it ended, and the cause of a failure."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import attrs
from attrs import frozen

from dsl.errors import DiskFull
from dsl.files import NO_SPACE, appended, clear_error, clear_errors, full_at
from dsl.finding import Finding
from dsl.launch import Launch
from executor.launchers.backend import Backend, HostExit, StageOrder, exits_path, host_log
from executor.launchers.failure import (
    DISK_FULL,
    HOST_LOST,
    NO_RESULT,
    NOT_RUN,
    RankFailure,
    ended_by,
    failure,
    failure_of,
    first_failed,
    only_lost_connections,
)
from executor.launchers.stage_contract import SHARED, STOP_REQUESTED, RankResult, StageSpec, read_exits
from executor.launchers.worker import EXECUTOR_GONE
from executor.store.lease import Lease
from executor.system.output import last_lines
from executor.system.resource_pool import Demand, Share

STOP_WITHIN_S = 5.0
WATCH_S = 0.5


@frozen
class StageExit:
    """The end of a stage.

    log_tail: the last lines of its log. memory, gpu_memory: peak bytes of all ranks together. gpu: the name of the
    first rank's GPU; empty without one. loaded: the files of the user's modules that it imported.
    """

    status: Literal["done", "stopped", "failed"]
    device: str = "cpu"
    failure: Finding | None = None
    log_tail: tuple[str, ...] = ()
    memory: int | None = None
    gpu_memory: int | None = None
    gpu: str = ""
    loaded: tuple[str, ...] = ()


class StageProcess:
    """A running stage. Its log gets stdout and stderr of all processes, with secrets replaced."""

    def __init__(
        self,
        backend: Backend,
        lease: Lease,
        spec: StageSpec,
        launch: Launch,
        share: Share,
        part: Demand,
        log: Path,
        secrets: tuple[str, ...] = (),
        transient: tuple[str, ...] = (),
    ) -> None:
        """Start the stage. share, part, secrets: as in StageOrder. transient: as in `failure`."""
        with clear_errors(log):
            appended(log).close()
        self._results = spec.results
        self._log = log
        self._log_start = log.stat().st_size
        self._launch = launch
        self._transient = transient
        self._stop_requested_at: float | None = None
        self._stop_requested = threading.Event()
        job, private = lease.path("job", ".json"), lease.path("private")
        with clear_errors(lease.folder):
            (self._results / SHARED).mkdir(parents=True)
            private.mkdir(mode=0o700)  # anyone who can write there could run code in the ranks
            job_digest = spec.write(job)
        self._stage = backend.start(
            StageOrder(
                node=spec.node,
                job=job,
                job_digest=job_digest,
                folder=lease.folder,
                results=self._results,
                events=spec.events,
                attempt=spec.attempt,
                private=private,
                log=log,
                directory=Path.cwd(),
                launch=launch,
                share=share,
                part=part,
                secrets=secrets,
            )
        )

    def wait(self) -> StageExit:
        """Wait for the stage to end, end every rank that still runs, and return the stage's exit."""
        while (hosts := self._stage.wait(WATCH_S)) is None:
            pass
        numbers = range(self._launch.processes + self._launch.pool_workers)
        results = [RankResult.read(self._results / f"{number}.json") for number in numbers]
        ended = self._exit(hosts, results)
        if hosts.log_errno and ended.status == "failed":
            error = OSError(hosts.log_errno, os.strerror(hosts.log_errno))
            lost = clear_error(error, self._log)  # the cause: from then on its output failed
            ended = attrs.evolve(ended, failure=failure_of(lost, self._transient))
        reported = [result for result in results if result is not None]
        return attrs.evolve(
            ended,
            memory=_sum(result.memory for result in reported),
            gpu_memory=_sum(result.gpu_memory for result in reported),
            gpu=next((result.gpu for result in reported if result.gpu), ""),
        )

    def _exit(self, hosts: HostExit, results: Sequence[RankResult | None]) -> StageExit:
        ranks = results[: self._launch.processes]
        done = [result for result in ranks if result is not None and result.status == "done"]
        needed = 1 if self._launch.shard_workers > 1 else len(ranks)  # the others do a lost worker's shards
        if hosts.code == 0 and len(done) >= needed:
            return StageExit(
                "done", done[0].device, loaded=tuple(sorted({file for result in done for file in result.loaded}))
            )
        if only_lost_connections(results) and self._was_stop_requested(hosts.code, results):
            return StageExit("stopped")
        exits = [each for host in range(self._launch.parts) for each in read_exits(exits_path(self._results, host))]
        each_host = self._launch.processes_of_part
        names = [hosts.hosts[number // each_host] for number in range(len(results))] if hosts.hosts else []
        first = first_failed(results, exits, names, self._launch.processes)
        if only_lost_connections(results, exits) and (hosts.error or hosts.lost):
            first = None
        found = (
            self._ended_alone(hosts, results) if first is None else failure(first.text, first.names, self._transient)
        )
        return StageExit("failed", failure=found, log_tail=self._shown(first))

    def _was_stop_requested(self, code: int | None, results: Sequence[RankResult | None]) -> bool:
        """Whether the stage ended by a stop request. A signal to all processes may reach it before the executor."""
        ends_by_signal = code == -signal.SIGTERM or any(result and result.status == "stopped" for result in results)
        return self._stop_requested.wait(STOP_WITHIN_S if ends_by_signal else 0.0)

    @property
    def is_placed(self) -> bool:
        """Whether it has room to run."""
        return self._stage.is_placed

    def request_stop(self) -> None:
        """Send SIGTERM once, so that `stage.stop_requested()` becomes true in every rank.

        If the stage has ended, its folder may be gone; on a full disk only the signal is sent.
        """
        if self._stop_requested_at is None:
            self._stop_requested_at = time.monotonic()
            self._stop_requested.set()
            with suppress(OSError):
                (self._results / STOP_REQUESTED).touch()
            self._stage.request_stop()

    def stopping_for(self) -> float:
        """Seconds since the stage was asked to stop; 0 where it was not."""
        return 0.0 if self._stop_requested_at is None else time.monotonic() - self._stop_requested_at

    def kill(self) -> None:
        self._stage.kill()

    def tail(self) -> tuple[str, ...]:
        """The last lines of this attempt's log."""
        return last_lines(self._log, self._log_start)

    def _shown(self, first: RankFailure | None) -> tuple[str, ...]:
        """The lines to show of a failed stage: the traceback of the rank that failed first, else the end of its log.

        With several ranks the log's end is less useful: other ranks often report the failure before the failed one.
        """
        of_rank = first is not None and first.rank < self._launch.processes  # a pool is on host 0
        host = first.rank // self._launch.processes_of_part if first is not None and of_rank else 0
        log = host_log(self._log, host)
        several = self._launch.processes + self._launch.pool_workers > 1
        shown = first.trace if first is not None and several else ()
        shown = shown or (last_lines(log, 0) if host else self.tail())
        return (*shown, f"log of that host: {log}") if host else shown

    def _ended_alone(self, hosts: HostExit, results: Sequence[RankResult | None]) -> Finding:
        """The failure of a stage in which no single rank failed."""
        if hosts.error:
            return failure(f"StageError: {hosts.error}", (NOT_RUN,))
        if hosts.lost:
            return failure(f"HostLost: {hosts.lost}", (HOST_LOST,))
        if any(result and result.status == "stopped" for result in results):
            return failure("StopRequested: the op raised it without a request to stop")
        if hosts.code == EXECUTOR_GONE:
            gone = self._results.parent
            return failure(
                f"StoreError: {gone}: {'cannot be used' if gone.is_dir() else 'is gone'}; was it removed or changed "
                "while the run used it?",
                ("dsl.errors.StoreError",),
            )
        if hosts.code == NO_SPACE:
            return failure(f"{DiskFull.__name__}: {full_at(self._results)}", (DISK_FULL,))
        return failure(hosts.failed, (NO_RESULT,)) if hosts.failed else ended_by(hosts.code)


def _sum(sizes: Iterable[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None
