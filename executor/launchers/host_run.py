"""One host's processes of a stage: their environment, log, start and end. Every backend runs them by this."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from dsl.errors import DiskFull
from dsl.files import append_line, appended, clear_errors
from dsl.imports import child_environment
from dsl.launch import Pool
from executor.launchers.backend import HostExit, StageOrder, exits_path, host_log
from executor.launchers.redacted_log import RedactedLog
from executor.launchers.stage_contract import THREAD_VARIABLES
from executor.records.events import Body, Event, System
from executor.system.resource_pool import VISIBLE, device_order
from executor.system.stage_mark import STAGE, new_mark, note_mark
from executor.system.supervisor import Child
from executor.system.system_metrics import Usage
from executor.system.user_cache import compile_cache

WORKER = "executor.launchers.worker"
# How long a thread of an OpenMP runtime spins for its next work before it sleeps: libgomp's in iterations of the
# loop, LLVM's and Intel's in ms. Their defaults are so high (300,000 iterations, 200 ms) that on a busy machine the
# loop uses the CPU that the awaited threads need. CHOICES: the variables by which a user overrides each default.
SPINS = {"GOMP_SPINCOUNT": "4000", "KMP_BLOCKTIME": "0"}
CHOICES = {
    "GOMP_SPINCOUNT": ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"),
    "KMP_BLOCKTIME": ("KMP_BLOCKTIME", "KMP_LIBRARY", "OMP_WAIT_POLICY"),
}
# Each rank starts a pool of compile processes: by default as many as it has CPU threads.
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
MOST_COMPILE_THREADS = 32  # torch's own limit
# torch's CUDA allocator, unless the user sets either name: torch 2.11 to 2.13 read both.
ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class WaitingWorker:
    """A worker started ahead of its node: it imports libraries, then waits on a socket for its job.

    It imports none of dflow's ops and no code of the user, since that may still be edited. Settings that must precede
    imports, such as threads and GPUs, are in its environment; a stage that needs another environment does not use it.
    """

    def __init__(self, node: str, environment: Mapping[str, str], libraries: Sequence[str]) -> None:
        self.node = node
        self.mark = new_mark()
        self.environment = dict(environment)
        self._is_stage = False
        self._orders, theirs = socket.socketpair()
        with theirs:
            marked = {**environment, STAGE: self.mark}
            self.child = Child(WORKER, ["--ahead", *libraries], marked, subprocess.DEVNULL, theirs.fileno())

    def is_for(self, node: str, environment: Mapping[str, str]) -> bool:
        return self.node == node and self.environment == environment and not self.child.ended_within(0)

    def run(self, job: Sequence[str], output: int) -> bool:
        """Turn the waiting worker into the stage of this job; False where the worker has just been killed."""
        with self._orders:
            try:
                socket.send_fds(self._orders, [json.dumps(job).encode()], [output])
            except ConnectionError:
                return False
        self._is_stage = True
        return True

    def close(self) -> None:
        """End the worker, unless it became a stage."""
        if self._is_stage:
            return
        self._orders.close()
        self.child.signal(signal.SIGKILL, whole_group=True)
        self.child.ended_within(None)


class HostRun:
    """The processes of a stage on one host, and their memory use; on this machine it implements RunningStage.

    number: the host's number, from 0. gpus: the devices that its ranks see, None for all.
    """

    is_placed = True

    def __init__(
        self,
        order: StageOrder,
        gpus: tuple[str, ...] | None,
        secrets: Sequence[str] = (),
        *,
        number: int = 0,
        address: str = "",
        variables: Mapping[str, str] | None = None,
        waiting: WaitingWorker | None = None,
    ) -> None:
        """Start the processes of the stage on this host.

        secrets: values that the log must not show. address: where rank 0 listens, "host:port"; empty if all ranks are
        on this host. variables: additions to the environment. waiting: a worker started ahead, used if it fits.
        """
        self.number = number
        self.gpus = gpus
        self._is_closed = False
        log = host_log(order.log, number)
        with clear_errors(log):
            appended(log).close()
        with clear_errors(order.private):
            self._redacted = RedactedLog(order.private / f"output-{number}", log, secrets) if secrets else None
        environment = {**stage_environment(order.share.threads, gpus), **(variables or {})}
        with clear_errors(log), appended(log if self._redacted is None else self._redacted.pipe) as output:
            self._child = _started(order, number, address, environment, output.fileno(), waiting)
        self._usage = Usage(self.pid, gpus, partial(_report_usage, order, number))

    @property
    def pid(self) -> int:
        """The process id of the worker, or of the parent of the ranks."""
        return self._child.pid

    def wait(self, seconds: float | None) -> HostExit | None:
        """Wait for the processes, and return how they ended; None if they still run then. The log is complete
        afterwards.
        """
        if not self._child.ended_within(seconds):
            return None
        self._usage.close()
        if self._redacted is not None and not self._is_closed:
            self._is_closed = True
            self._redacted.close()
        error = None if self._redacted is None else self._redacted.error
        return HostExit(code=self._child.code, log_errno=0 if error is None else error.errno or errno.EIO)

    def request_stop(self) -> None:
        self._child.signal(signal.SIGTERM)

    def kill(self) -> None:
        self._child.signal(signal.SIGKILL, whole_group=True)


def write_event(order: StageOrder, body: Body) -> None:
    append_line(order.events, Event(time.time(), order.node, order.attempt, body).to_json())


def _report_usage(order: StageOrder, number: int, metrics: Mapping[str, float]) -> None:
    """Write metrics on resource use to the run's log; those of hosts after the first carry the host's number."""
    prefix = f"host_{number}_" if number else ""
    with suppress(DiskFull, OSError):  # which the stage reports itself
        write_event(order, System({f"{prefix}{name}": value for name, value in metrics.items()}))


def _started(
    order: StageOrder,
    number: int,
    address: str,
    environment: Mapping[str, str],
    output: int,
    waiting: WaitingWorker | None,
) -> Child:
    job, launch = [str(order.job), order.job_digest], order.launch
    if waiting is not None and waiting.is_for(order.node, environment):
        with clear_errors(order.folder):
            note_mark(order.folder, waiting.mark)
        if waiting.run(job, output):
            return waiting.child
    mark = new_mark()
    with clear_errors(order.folder):
        note_mark(order.folder, mark)
    environment = {**environment, STAGE: mark}
    if launch.kind == "process" and launch.shard_workers == 1:
        return Child(WORKER, job, environment, output)
    arguments = [
        *("--exits", str(exits_path(order.results, number))),
        *("--first", str(number * launch.processes_of_part)),
        *("--here", str(launch.processes_of_part)),
        *("--total", str(launch.processes)),
        *("--meet", address or str(order.private / "store")),
    ]
    shared = ["--shared"] if launch.shard_workers > 1 else []
    pool = [] if launch.pool is None else pool_arguments(launch.pool, launch.retries)
    return Child("executor.launchers.rank_processes", [*arguments, *shared, *pool, *job], environment, output)


def pool_arguments(pool: Pool, retries: int) -> list[str]:
    """The arguments by which the parent of the ranks starts the workers of a pool."""
    counts = {"--pool": pool.workers, "--pool-threads": pool.threads, "--pool-starts": retries + 1}
    return [text for name, count in counts.items() for text in (name, str(count))]


def stage_environment(threads: int, gpus: Sequence[str] | None = None) -> dict[str, str]:
    """The environment of a stage: this process's, with fixed thread counts and devices.

    `ops` in the working directory cannot shadow dflow's. Idle threads go to sleep soon, unless this environment says
    how they wait. gpus: the devices that the stage sees; None for all.
    """
    # Growing segments avoid fragmentation: micro-batches differ in size.
    is_default = (gpus is None or gpus) and not any(name in os.environ for name in ALLOCATOR_NAMES)
    allocator = {ALLOCATOR_NAMES[0]: "expandable_segments:True"} if is_default else {}
    return {
        **child_environment(),
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        **bounded_spin(),
        **device_order(),
        **({} if gpus is None else {VISIBLE: ",".join(gpus)}),
        COMPILE_THREADS: os.environ.get(COMPILE_THREADS, str(min(threads, MOST_COMPILE_THREADS))),
        **allocator,
        **compile_cache(),
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",  # progress goes through the stage; bars would fill the log
    }


def bounded_spin() -> dict[str, str]:
    """The variables that limit how long waiting threads spin, except for runtimes that the user configured."""
    return {name: value for name, value in SPINS.items() if not any(choice in os.environ for choice in CHOICES[name])}
