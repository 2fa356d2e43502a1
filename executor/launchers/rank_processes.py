"""The processes of a stage on one host: started, watched and ended together.

    python -m executor.launchers.rank_processes --exits F --first N --here N --total N --meet M [--shared]
        [--pool N --pool-threads N --pool-starts N] JOB DIGEST

Each of them is a `python -m executor.launchers.worker JOB DIGEST`, and ends with this process. They are ranks FIRST to
FIRST + HERE - 1 of TOTAL, numbered by torchrun's variables. If all ranks are on this host, M is a file in a folder
that only this user may enter: no port is opened here, and those of gloo and nccl stay on the loopback interface. Else M
is the "host:port" where rank 0 listens, in a network that docs/cluster.md requires to be private.

When a rank has failed, the others get SIGTERM at once, and SIGKILL 30 s later: `executor.launchers.worker` ends them
earlier. A signal to this process is passed on to all ranks, once. Failed ranks are written to the file F, see
stage_contract.py.

--shared: workers that share shards, each a stage of its own with one rank. One that is killed is reported to the
others, which do its shards again; while one of them has success, the stage has.

--pool: workers that compute for the ranks and keep nothing. One that is killed, or that a rank reports as hung, is
started again, at most --pool-starts times in all; the stage continues while one of them runs. One that fails by an
error ends the ranks, which would meet it as well. Workers get SIGTERM when no rank runs any more. Their secret is made
here, and is in their and the ranks' environment only.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import attrs
from attrs import define, frozen

from dsl.convert import unstructure
from dsl.imports import module_command
from dsl.stage import HUNG, LOOPBACK_ONLY, RENDEZVOUS, PoolRendezvous
from executor.launchers.stage_contract import (
    ONE_OF_SEVERAL,
    POOL,
    PROCESS,
    SHARED,
    THREAD_VARIABLES,
    WORKER,
    WORKERS,
    RankExit,
    report_lost,
    write_exits,
)
from executor.system.supervisor import ENDING, PARENT, begin_as_child, exit_text

FORWARDED = (*ENDING, signal.SIGHUP, signal.SIGQUIT)
KILL_AFTER_S = 30.0
END_POOL_WITHIN_S = 5.0
LOOK_FOR_HUNG_S = 1.0
POOL_FOLDER = "pool"  # in the stage's shared folder
# Another rendezvous in the user's environment: of hosts, or of ranks started by something else.
OTHER_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "NCCL_COMM_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")


@frozen
class Rank:
    """The process of one rank, or of a worker of the pool, whose numbers follow those of all ranks.

    descriptor: a pidfd, readable once the process has ended.
    """

    number: int
    process: subprocess.Popen[bytes]
    descriptor: int
    worker: int | None = None


def main() -> int:
    begin_as_child()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)  # no rank runs yet
    options = _options(sys.argv[1:])
    woken = _wake_up_on(FORWARDED)
    environment = {name: value for name, value in os.environ.items() if name not in OTHER_RENDEZVOUS}
    numbers = range(options.first, options.first + options.here)
    if options.shared:
        variables = {
            number: {WORKER: str(number), WORKERS: str(options.total), "LOCAL_RANK": str(number - options.first)}
            for number in numbers
        }
    else:
        variables = {
            number: rank_environment(number, options.total, options.first, options.here, options.meet)
            for number in numbers
        }
    pool = None
    if options.pool:
        rendezvous = PoolRendezvous(
            workers=options.pool,
            folder=options.exits.parent / SHARED / POOL_FOLDER,
            private=Path(options.meet).parent,
            secret=secrets.token_hex(32),
        )
        environment[POOL] = json.dumps(unstructure(rendezvous))
        pool = PoolProcesses(rendezvous, options, environment)
    several = {**environment, ONE_OF_SEVERAL: "1"}
    ranks = [_start(number, options.job, options.digest, {**several, **variables[number]}) for number in numbers]
    watch = Watch(ranks, woken, options.exits.parent if options.shared else None, pool)
    ended_badly = watch.until_all_ended()
    if pool is not None:
        pool.remove_sockets()
        if all(ended.rank >= options.total for ended in ended_badly):  # all ranks had what they needed
            return 0
    if ended_badly:
        write_exits(options.exits, ended_badly)
    return 0 if not ended_badly or (options.shared and watch.succeeded) else 1


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--exits", type=Path)
    parser.add_argument("--first", type=int)
    parser.add_argument("--here", type=int)
    parser.add_argument("--total", type=int)
    parser.add_argument("--meet")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--pool", type=int, default=0)
    parser.add_argument("--pool-threads", type=int, default=1)
    parser.add_argument("--pool-starts", type=int, default=1)
    parser.add_argument("job")
    parser.add_argument("digest")
    return parser.parse_args(arguments)


def rank_environment(
    rank: int, ranks: int, first: int = 0, here: int | None = None, meet: str | None = None
) -> dict[str, str]:
    """The environment variables that number a rank and say where it meets the others.

    first, here: the first rank of this host, and the number of its ranks. meet: the address where ranks meet. If all
    are on this host, they communicate by the loopback interface only.
    """
    here = ranks if here is None else here
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - first),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_RANK": str(first // here),
        "GROUP_WORLD_SIZE": str(ranks // here),
        "NCCL_RAS_ENABLE": os.environ.get("NCCL_RAS_ENABLE", "0"),  # it would listen for queries from anybody
        # As torchrun sets it: a rank whose collective fails is torn down, with its connections to the others.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if here == ranks:
        return variables | LOOPBACK_ONLY | ({} if meet is None else {RENDEZVOUS: meet})
    address, _, port = str(meet).rpartition(":")
    return variables | {"MASTER_ADDR": address, "MASTER_PORT": port}


def _start(number: int, job: str, digest: str, environment: Mapping[str, str]) -> Rank:
    process = subprocess.Popen(
        module_command("executor.launchers.worker", job, digest),
        env={**environment, PARENT: str(os.getpid())},
        start_new_session=True,  # its own scheduling group, and a process group to signal
    )
    return Rank(number, process, os.pidfd_open(process.pid))


@define
class PoolProcesses:
    """Starts the workers of a pool. rendezvous, environment: those of the ranks. starts: of each worker so far."""

    rendezvous: PoolRendezvous
    options: argparse.Namespace
    environment: Mapping[str, str]
    starts: dict[int, int] = attrs.Factory(dict)

    def start(self, worker: int) -> Rank:
        start = self.starts.get(worker, 0)
        self.starts[worker] = start + 1
        number = self.options.total + worker
        own = attrs.evolve(self.rendezvous, worker=worker, start=start)
        variables = {
            **dict.fromkeys(THREAD_VARIABLES, str(self.options.pool_threads)),
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": str(self.options.here + worker),  # the ranks have the first GPUs
            PROCESS: str(number),
            POOL: json.dumps(unstructure(own)),
        }
        started = _start(number, self.options.job, self.options.digest, {**self.environment, **variables})
        return attrs.evolve(started, worker=worker)

    def remove_sockets(self) -> None:
        """Remove the sockets of all workers; a killed one leaves its own."""
        for worker, starts in self.starts.items():
            for start in range(starts):
                name = attrs.evolve(self.rendezvous, worker=worker, start=start).name
                (self.rendezvous.private / name).unlink(missing_ok=True)

    def may_start(self, worker: int) -> bool:
        allowed: int = self.options.pool_starts
        return self.starts[worker] < allowed

    def hung(self) -> set[int]:
        """The workers that a rank reports as hung."""
        if not self.rendezvous.folder.exists():
            return set()
        names = {file.name for file in self.rendezvous.folder.iterdir()}
        own = {worker: attrs.evolve(self.rendezvous, worker=worker, start=n - 1) for worker, n in self.starts.items()}
        return {worker for worker, rendezvous in own.items() if rendezvous.name + HUNG in names}


def _wake_up_on(numbers: tuple[signal.Signals, ...]) -> int:
    """Catch these signals; returns a descriptor from which their numbers can be read. They have no other effect."""
    woken, wake_up = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda number, frame: None)  # without a handler the descriptor does not get the number
    return woken


class Watch:
    """Watches ranks, and the pool's workers, until none runs.

    results: the folder where workers that share shards learn of lost ones.
    """

    def __init__(
        self, ranks: list[Rank], woken: int, results: Path | None = None, pool: PoolProcesses | None = None
    ) -> None:
        self.succeeded = False  # at least one of them
        self._woken = woken
        self._results = results
        self._running = {rank.number: rank for rank in ranks}
        self._ended_badly: list[RankExit] = []
        self._is_ending = False
        self._kill_at: float | None = None  # monotonic; set once ranks were signalled to end
        self._pool = pool
        self._workers: dict[int, Rank] = {}
        self._kill_pool_at: float | None = None  # monotonic; set once no rank runs
        self._selector = selectors.DefaultSelector()
        self._selector.register(woken, selectors.EVENT_READ)
        for rank in ranks:
            self._selector.register(rank.descriptor, selectors.EVENT_READ, rank)
        for worker in range(0 if pool is None else pool.rendezvous.workers):
            self._start_worker(worker)

    def until_all_ended(self) -> list[RankExit]:
        """Wait until all ranks have ended, and return those that failed."""
        while self._running or self._workers:
            for key, _ in self._selector.select(self._sleep()):
                if key.data is None:
                    self._request_end(os.read(self._woken, 1)[0])
                elif key.data.worker is None:
                    self._note_end(key.data)
                else:
                    self._note_end_of_worker(key.data)
            if self._pool is not None:
                self._look_after(self._pool)
            if any(self._ends_others(ended) for ended in self._ended_badly):
                self._request_end(signal.SIGTERM)
            if self._time_left() == 0.0:
                self._kill_at = None  # once, also for a rank that the kernel ends only later
                self._send(signal.SIGKILL)
        return self._ended_badly

    def _ends_others(self, ended: RankExit) -> bool:
        """Whether the other processes must end because this one did.

        Workers continue when one is killed, but not after an error, which they would meet as well.
        """
        return self._results is None or ended.code > 0

    def _time_left(self) -> float | None:
        """Seconds until the remaining ranks are killed, None where none has to end, or all were killed."""
        return None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())

    def _sleep(self) -> float | None:
        """Seconds until something is due, None for no limit."""
        left = self._time_left()
        return left if self._pool is None else min(LOOK_FOR_HUNG_S, LOOK_FOR_HUNG_S if left is None else left)

    def _start_worker(self, worker: int) -> None:
        assert self._pool is not None
        self._workers[worker] = started = self._pool.start(worker)
        self._selector.register(started.descriptor, selectors.EVENT_READ, started)

    def _look_after(self, pool: PoolProcesses) -> None:
        """Kill hung workers, and end all once no rank runs: they keep nothing."""
        if self._running:
            for worker in pool.hung() & self._workers.keys():
                self._say(f"pool worker {worker} does not answer: it is killed")
                os.killpg(self._workers[worker].process.pid, signal.SIGKILL)
        elif self._kill_pool_at is None:
            self._kill_pool_at = time.monotonic() + END_POOL_WITHIN_S
            self._signal_pool(signal.SIGTERM)
        elif time.monotonic() > self._kill_pool_at:
            self._signal_pool(signal.SIGKILL)

    def _signal_pool(self, number: int) -> None:
        for worker in self._workers.values():
            os.killpg(worker.process.pid, number)

    def _note_end_of_worker(self, ended: Rank) -> None:
        """Start a worker that was killed again; one that failed ends the ranks, and the last one too."""
        assert self._pool is not None and ended.worker is not None
        code = self._code_of(ended)
        del self._workers[ended.worker]
        if self._is_ending or not self._running:
            return
        again = code <= 0 and self._pool.may_start(ended.worker)
        self._say(
            f"pool worker {ended.worker} (process {ended.process.pid}) {exit_text(code)}"
            + ("; it is started again" if again else "")
        )
        if again:
            self._start_worker(ended.worker)
        elif code > 0 or not self._workers:
            self._ended_badly.append(RankExit(ended.number, code, time.time()))

    def _say(self, text: str) -> None:
        with suppress(OSError):  # a full disk must not keep the others from ending
            print(text, file=sys.stderr, flush=True)

    def _code_of(self, rank: Rank) -> int:
        """The exit code of a process that has ended, which is not watched any more."""
        code = rank.process.wait()
        self._selector.unregister(rank.descriptor)
        os.close(rank.descriptor)
        return code

    def _note_end(self, rank: Rank) -> None:
        code = self._code_of(rank)
        del self._running[rank.number]
        self.succeeded = self.succeeded or not code
        if code:
            self._ended_badly.append(RankExit(rank.number, code, time.time()))
            if self._results is not None:
                report_lost(self._results, rank.number)
            self._say(f"rank {rank.number} (process {rank.process.pid}) {exit_text(code)}")

    def _request_end(self, number: int) -> None:
        """Send a signal to the ranks once only: a rank that received it may be saving a checkpoint."""
        if not self._is_ending:
            self._is_ending = True
            self._kill_at = time.monotonic() + KILL_AFTER_S
            self._send(number)

    def _send(self, number: int) -> None:
        """Send a signal to the group of each rank. A rank that was not waited for still owns its process group."""
        for rank in self._running.values():
            os.killpg(rank.process.pid, number)


if __name__ == "__main__":
    sys.exit(main())
