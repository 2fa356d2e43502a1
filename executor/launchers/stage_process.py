"""Where a stage runs: a process of its own, or ranks on one host or several, ended with the executor."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import attrs
from attrs import frozen

from dsl.errors import DiskFull, StageError
from dsl.launch import Launch
from executor.launchers.failure import (
    DISK_FULL,
    HOST_LOST,
    NO_RESULT,
    Failure,
    cause_of,
    ended_by,
    only_lost_connections,
)
from executor.launchers.forkserver_client import Child, Children
from executor.launchers.host_folder import HostFolder, Offer, exits_path, host_log, torchrun_arguments
from executor.launchers.hosts import SeveralHosts, endpoint_of
from executor.launchers.redaction import RedactedLog
from executor.launchers.stage_contract import STOP_REQUESTED, RankResult, StageSpec, read_exits
from executor.launchers.worker import EXECUTOR_GONE, NO_LOG
from executor.store.lease import Lease
from executor.system.log_tail import last_lines
from executor.system.os_errors import NO_SPACE, clear_error, clear_errors, full_at
from executor.system.resource_pool import VISIBLE, Share, device_order
from executor.system.stage_mark import STAGE, stage_mark
from executor.system.supervisor import child_environment
from executor.system.symlinks import appended
from executor.system.user_cache import compile_cache

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
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
STOP_WITHIN_S = 5.0


@frozen
class StageExit:
    """How a stage ended. log_tail: the last lines of the log; memory, gpu_memory: peak bytes of all ranks together;
    loaded: the files of the user's modules that it imported.
    """

    status: Literal["done", "stopped", "failed"]
    device: str = "cpu"
    failure: Failure | None = None
    log_tail: tuple[str, ...] = ()
    memory: int | None = None
    gpu_memory: int | None = None
    loaded: tuple[str, ...] = ()


class StageProcess:
    """A running stage. Its log gets stdout and stderr of all its processes, with the values of secrets replaced.

    The life line is a FIFO with the executor as only writer: it breaks when the executor ends, however it ends.
    info: shows the user a line.
    """

    def __init__(
        self,
        children: Children,
        lease: Lease,
        spec: StageSpec,
        launch: Launch,
        share: Share,
        log: Path,
        info: Callable[[str], None],
        secrets: Sequence[str] = (),
    ) -> None:
        with clear_errors(log):
            appended(log).close()
        self._results = spec.results
        self._log = log
        self._log_start = log.stat().st_size
        self._info = info
        self._launch = launch
        if launch.nnodes > 1:
            endpoint_of(launch.rendezvous)  # refuses an unusable address before anything waits
        self._stop_requested_at: float | None = None
        self._stop_requested = threading.Event()
        self._life_line_path = spec.life_line
        spec_path, rendezvous = lease.path("job", ".json"), lease.path("rendezvous")
        with clear_errors(lease.folder):
            self._results.mkdir()
            if launch.kind == "torchrun" and launch.nnodes == 1:
                rendezvous.mkdir(mode=0o700)  # anyone who can write there could run code in the ranks
            spec.write(spec_path)
            os.mkfifo(self._life_line_path)
            self._life_line = os.open(self._life_line_path, os.O_RDWR)
            self._redacted = RedactedLog(lease.path("output"), log, secrets) if secrets else None
        output = log if self._redacted is None else self._redacted.pipe
        environment = {**stage_environment(share.threads, share.gpus), STAGE: stage_mark(lease.folder, lease.id)}

        def start(module: str, arguments: Sequence[str]) -> Child:
            return children.start(module, arguments, environment, output)

        self._several = self._on_several_hosts(lease, share, spec.node, start) if launch.nnodes > 1 else None
        self._child: Child | SeveralHosts = self._several or start(
            *_command(launch, spec_path, self._results, rendezvous)
        )

    def _on_several_hosts(
        self, lease: Lease, share: Share, node: str, start: Callable[[str, Sequence[str]], Child]
    ) -> SeveralHosts:
        """start: called with a module and its arguments."""
        offer = Offer(
            node=node,
            run=self._log.parent.name,
            executor=socket.gethostname(),
            hosts=self._launch.nnodes,
            nproc=self._launch.nproc,
            threads=share.threads,
            gpus=None if share.gpus is None else len(share.gpus),
            job=str(lease.path("job", ".json")),
            results=str(self._results),
            log=str(self._log),
            directory=str(Path.cwd()),
        )
        folder = HostFolder(lease.path("hosts"))
        with clear_errors(folder.path):
            folder.path.mkdir()

        def start_here(endpoint: str) -> Child:
            return start("executor.launchers.torchrun", torchrun_arguments(offer, folder, 0, Path(offer.job), endpoint))

        store = lease.folder.parent.parent
        return SeveralHosts(folder, offer, store, self._launch.rendezvous, start_here, self._report)

    def wait(self) -> StageExit:
        """Return when the stage has ended, after ending every rank that still runs."""
        try:
            code = self._child.wait()
        except StageError as error:
            return StageExit("failed", failure=Failure.of(error), log_tail=self.tail())
        finally:
            os.close(self._life_line)
            self._life_line_path.unlink(missing_ok=True)
            if self._redacted is not None:
                self._redacted.close()
        ranks = range(self._launch.world_size)
        results = [RankResult.read(self._results / f"{rank}.json") for rank in ranks]
        ended = self._exit(code, results)
        if self._redacted is not None and self._redacted.error is not None and ended.status == "failed":
            lost = clear_error(self._redacted.error, self._log)  # the cause: from then on its output failed
            ended = attrs.evolve(ended, failure=Failure.of(lost))
        reported = [result for result in results if result is not None]
        return attrs.evolve(
            ended,
            memory=_sum(result.memory for result in reported),
            gpu_memory=_sum(result.gpu_memory for result in reported),
        )

    def _exit(self, code: int | None, results: Sequence[RankResult | None]) -> StageExit:
        done = [result for result in results if result is not None and result.status == "done"]
        if code == 0 and len(done) == len(results):
            return StageExit(
                "done", done[0].device, loaded=tuple(sorted({file for result in done for file in result.loaded}))
            )
        if only_lost_connections(results) and self._was_stop_requested(code, results):
            return StageExit("stopped")
        failure = self._failure(code, results)
        return StageExit("failed", failure=failure, log_tail=self._shown(failure))

    def _was_stop_requested(self, code: int | None, results: Sequence[RankResult | None]) -> bool:
        """Whether the run is to stop. A signal sent to all processes may reach the stage before the executor."""
        ends_by_signal = code == -signal.SIGTERM or any(result and result.status == "stopped" for result in results)
        return self._stop_requested.wait(STOP_WITHIN_S if ends_by_signal else 0.0)

    @property
    def pid(self) -> int | None:
        """The root process of the stage on this host; None before it is known."""
        return self._child.pid

    def request_stop(self) -> None:
        """SIGTERM, once: `stage.stop_requested()` becomes true in every rank (the parent of the ranks passes it on).

        Where the stage has ended, its folder may be gone; on a full disk only the signal is sent.
        """
        if self._stop_requested_at is None:
            self._stop_requested_at = time.monotonic()
            self._stop_requested.set()
            with suppress(OSError):
                (self._results / STOP_REQUESTED).touch()
            self._child.signal(signal.SIGTERM)

    def stopping_for(self) -> float:
        """Seconds since the stage was requested to stop, 0 where it was not."""
        return 0.0 if self._stop_requested_at is None else time.monotonic() - self._stop_requested_at

    def kill(self) -> None:
        self._child.signal(signal.SIGKILL, whole_group=True)

    def tail(self) -> tuple[str, ...]:
        """The last lines of this attempt's log."""
        return last_lines(self._log, self._log_start)

    def _report(self, text: str) -> None:
        """Show the user a line, and write it to the log."""
        with clear_errors(self._log), appended(self._log) as log:
            log.write(f"info: {text}\n".encode())
        self._info(text)

    def _shown(self, failure: Failure) -> tuple[str, ...]:
        """Of several ranks the traceback of the failed one, else the end of its log.

        The log has more: the others report its end, often before it does.
        """
        host = (failure.rank or 0) // self._launch.nproc
        log = host_log(self._log, host)
        shown = failure.trace if self._launch.world_size > 1 else ()
        shown = shown or (last_lines(log, 0) if host else self.tail())
        return (*shown, f"log of that host: {log}") if host else shown

    def _failure(self, code: int | None, results: Sequence[RankResult | None]) -> Failure:
        hosts = self._several.names if self._several is not None else []
        exits = [
            rank_exit
            for host in range(self._launch.nnodes)
            for rank_exit in read_exits(Path(exits_path(self._results, host)))
        ]
        cause = cause_of(
            results, exits, [hosts[rank // self._launch.nproc] for rank in range(len(results))] if hosts else []
        )
        lost, broken = ("", "") if self._several is None else (self._several.lost, self._several.broken)
        if lost and only_lost_connections(results, exits):
            return Failure(f"HostLost: {lost}", (HOST_LOST,))
        if cause is not None:
            return cause
        if any(result and result.status == "stopped" for result in results):
            return Failure("StopRequested: the op raised it without a request to stop")
        if code in (EXECUTOR_GONE, NO_LOG):
            gone = self._log.parent if code == NO_LOG else self._results.parent
            return Failure(
                f"StoreError: {gone}: {'cannot be used' if gone.is_dir() else 'is gone'}; was it removed or changed "
                "while the run used it?",
                ("dsl.errors.StoreError",),
            )
        if code == NO_SPACE:
            return Failure(f"{DiskFull.__name__}: {full_at(self._results)}", (DISK_FULL,))
        return Failure(broken, (NO_RESULT,)) if broken else ended_by(code)


def _sum(sizes: Iterable[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def _command(launch: Launch, job: Path, results: Path, rendezvous: Path) -> tuple[str, list[str]]:
    """The module whose `main` a stage on one host runs, and its arguments. rendezvous: an empty folder."""
    if launch.kind == "process":
        return "executor.launchers.worker", [str(job)]
    return "executor.launchers.ranks", [exits_path(results, 0), str(rendezvous / "store"), str(launch.nproc), str(job)]


def stage_environment(threads: int, gpus: Sequence[str] | None = None) -> dict[str, str]:
    """This process's environment with fixed thread counts; `ops` in the working directory cannot shadow dflow's.

    Waiting threads sleep soon, unless this environment sets how they wait.

    gpus: the devices that the stage sees; None leaves them all.
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
    """The variables of SPINS, except for runtimes that the user has configured."""
    return {name: value for name, value in SPINS.items() if not any(choice in os.environ for choice in CHOICES[name])}
