"""The child's side of a stage: load the inputs, import the op's run module, call it, and report how it ended.

    python -m executor.launchers.worker <work>/job-<attempt>.json DIGEST   (one per rank, or per worker)
    python -m executor.launchers.worker --ahead LIBRARY...                 (see WaitingWorker in host_run.py)

This module does not import torch; the op's run module may. The kernel ends a process when the one that started it is
gone (supervisor.py). A late one, whose work folder has passed to another attempt, ends too. How it ended is written to
results-<attempt>/<rank>.json, see stage_contract.py.

SIGTERM requests a stop where results-<attempt>/stop exists. Else it comes from the parent, to the
remaining ranks when one has failed: they end within END_WITHIN_S, even those that hang in a collective.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from attrs import field, frozen

from dsl.convert import structure
from dsl.errors import ConfigError, DflowError, DiskFull, LeaseLost, StopRequested, StoreError
from dsl.files import NO_SPACE, append_line, full_at, is_full, parse_json
from dsl.graph import GraphNode, node_from_json
from dsl.imports import (
    PROJECT,
    import_from_source,
    is_below,
    is_interpreters,
    named_function,
    no_collection,
    take_search_path,
)
from dsl.secrets import redact, resolved, secret_values
from dsl.stage import PoolRendezvous, Stage
from executor.keys.node_key import node_inputs
from executor.launchers.failure import error_names
from executor.launchers.stage_contract import (
    ONE_OF_SEVERAL,
    POOL,
    PROCESS,
    SHARED,
    WORKER,
    WORKERS,
    InputArtifact,
    RankError,
    RankResult,
    StageSpec,
    is_stop_requested,
    lost_workers,
    read_sealed,
)
from executor.records.events import Body, Cut, Event, Figure, Info, Metric, Progress, Warned
from executor.store.lease import share_ranks
from executor.system.crash_points import fail_point
from executor.system.hardware import NO_GPU
from executor.system.output import indented
from executor.system.supervisor import ENDING, GONE, begin_as_child

STOPPED = 75
EXECUTOR_GONE = GONE
AHEAD = "--ahead"
LONGEST_JOB = 65536  # bytes
END_WITHIN_S = 10
WATCH_EVERY_S = 0.5
PROGRESS_EVERY_S = 0.2
BLOCKED = threading.local()  # mask: the signal mask of a forking thread before the fork


@frozen
class WorkerStage:
    """The Stage object that ops get, inside a stage's process. Only rank 0 writes events, and no worker of a pool."""

    inputs: Mapping[str, Any]
    out_dir: Path
    work_dir: Path
    rank: int
    world_size: int
    sp_degree: int
    worker: int
    workers: int
    pool: PoolRendezvous | None
    device: str
    started_before: bool
    _spec: StageSpec
    _stop: threading.Event
    _secrets: tuple[str, ...] = ()
    _written: dict[type[Body], float] = field(factory=dict)  # when this attempt wrote an event last, monotonic

    @property
    def _is_first(self) -> bool:
        return self.rank == 0 and (self.pool is None or self.pool.worker is None)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if not self._is_first:
            return
        if self._spec.attempt > 1 and Metric not in self._written:
            self._event(Cut(int(step)))
        shown = {redact(name, self._secrets): float(value) for name, value in metrics.items()}
        self._event(Metric(int(step), shown))

    def progress(self, done: int, total: int) -> None:
        last = self._written.get(Progress, -math.inf)
        if self._is_first and (done >= total or time.monotonic() - last >= PROGRESS_EVERY_S):
            self._event(Progress(int(done), int(total)))

    def info(self, text: str) -> None:
        self._report("info", Info, text)

    def warn(self, text: str) -> None:
        self._report("warning", Warned, text)

    def figure(self, name: str, fig: Any) -> None:
        if not self._is_first:
            return
        name = redact(name, self._secrets)
        path = self._spec.figures / f"{name}.png"
        fresh = path.parent / ".fresh" / path.name  # replaces an earlier one, which an event names, only when complete
        fresh.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(fresh)
        fresh.replace(path)
        self._event(Figure(name, str(path)))

    def stop_requested(self) -> bool:
        return self._stop.is_set()

    @property
    def shared_dir(self) -> Path:
        return self._spec.results / SHARED

    def lost_workers(self) -> frozenset[int]:
        return lost_workers(self._spec.results)

    def _report(self, prefix: str, kind: type[Info | Warned], text: str) -> None:
        print(f"{prefix}: {indented(str(text))}", flush=True)
        if self._is_first:
            self._event(kind(redact(str(text), self._secrets)))

    def _event(self, body: Body) -> None:
        self._written[type(body)] = time.monotonic()
        spec = self._spec
        append_line(spec.events, Event(time.time(), spec.node, spec.attempt, body).to_json())


def main() -> int:
    begin_as_child()
    job, digest = _awaited_job(sys.argv[2:]) if sys.argv[1] == AHEAD else sys.argv[1:]
    try:
        spec = StageSpec.read(Path(job), digest)
    except StoreError as error:
        print(f"StoreError: {error}", file=sys.stderr, flush=True)
        return 1
    if spec is None:
        return EXECUTOR_GONE
    rank = int(os.environ.get("RANK", "0"))
    process = rank or int(
        os.environ.get(PROCESS) or os.environ.get(WORKER, "0")
    )  # of this process among those of the stage
    stop = threading.Event()
    for number in ENDING:
        signal.signal(number, lambda number, frame: stop.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    os.register_at_fork(before=_block_signals, after_in_parent=_restore_signals, after_in_child=_reset_signals)
    try:
        share_ranks(spec.folder, spec.token, spec.lease_id)
        _watch(spec, process)
    except (LeaseLost, FileNotFoundError):  # a later attempt took or cleared the folder
        return EXECUTOR_GONE
    fail_point("worker:started")
    result = spec.results / f"{process}.json"
    sys.excepthook = partial(_report_error, result, ())
    try:
        device, loaded = _run(spec, rank, stop, result)
    except StopRequested as request:
        print(f"stopped: {request}", flush=True)
        RankResult(status="stopped", memory=_memory(), gpu_memory=_gpu_memory()).write(result)
        return STOPPED
    fail_point("worker:op-done")
    done = RankResult(
        status="done", device=device, loaded=loaded, memory=_memory(), gpu_memory=_gpu_memory(), gpu=_gpu_name()
    )
    done.write(result)
    fail_point("worker:reported")
    return 0


def _awaited_job(libraries: Sequence[str]) -> Sequence[str]:
    """Import libraries ahead, then wait for the job: returns its arguments, and redirects output to its log.

    Exits if no stage needs this process.
    """
    with no_collection():
        for name in libraries:
            with suppress(ImportError):  # which the stage itself raises, in its log
                importlib.import_module(name)
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as orders:
        text, (*logs,), _, _ = socket.recv_fds(orders, LONGEST_JOB, 1)
    if not text:
        sys.exit()
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    for stream in (sys.stdout, sys.stderr):
        os.dup2(logs[0], stream.fileno())
    os.close(logs[0])
    job: list[str] = json.loads(text)
    return job


def _block_signals() -> None:
    """Block the ending signals until the child has its own handlers, so that none is lost."""
    BLOCKED.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def _restore_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, BLOCKED.mask)


def _reset_signals() -> None:
    """Reset signal handlers in a forked process: `Pool.terminate` would wait forever for one that ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _restore_signals()


def _run(spec: StageSpec, rank: int, stop: threading.Event, result: Path) -> tuple[str, tuple[str, ...]]:
    """Run the op. Returns its device, and the files of the user's modules that it loaded."""
    sources = read_sealed(spec.sources, spec.sources_digest) or {}
    import_from_source({file: text.encode("latin-1") for file, text in sources.items()})
    take_search_path(spec.search_path)
    node = node_from_json(spec.node_json)
    take_search_path(spec.search_path)  # the op files may have changed it, as they did when the key was computed
    declared = frozenset(sys.modules)
    sys.excepthook = partial(_report_error, result, secret_values(node.config))
    with no_collection():
        run: Callable[[Any, Stage], None] = named_function(node.op.run)
    device = _device(spec.device)
    stage = WorkerStage(
        inputs=_inputs(node, spec.artifacts),
        out_dir=spec.out_dir,
        work_dir=spec.work_dir,
        rank=rank,
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        sp_degree=spec.sp_degree,
        worker=int(os.environ.get(WORKER, "0")),
        workers=int(os.environ.get(WORKERS, "1")),
        pool=structure(PoolRendezvous, parse_json(os.environ[POOL])) if POOL in os.environ else None,
        device=device,
        started_before=spec.started_before,
        spec=spec,
        stop=stop,
        secrets=secret_values(node.config),
    )
    run(resolved(node.config), stage)
    return device, _loaded_files(spec.search_path, declared)


def _loaded_files(path: Sequence[str], declared: frozenset[str]) -> tuple[str, ...]:
    """The files of the user's modules that the op imported, or that are outside the search path.

    The op files of the whole pipeline are loaded, with their imports; a key covers only those of its own op. A
    module without an absolute path exists only in memory, such as torch.ops and torch.classes.
    """
    folders = [folder for folder in path if not is_interpreters(folder)]
    files = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not Path(file).is_absolute() or is_interpreters(file) or is_below(file, [str(PROJECT)]):
            continue
        if name not in declared or not is_below(file, folders):
            files.append(file)
    return tuple(sorted(files))


def _memory() -> int:
    """Peak bytes of this rank, plus those of its largest child if that is larger.

    A smaller child cannot be measured: until it runs its own program, Linux counts its parent's memory as its own. For
    the same reason this rank's own peak is not taken from getrusage.
    """
    rows = Path("/proc/self/status").read_text().splitlines()
    own = next(int(row.split()[1]) for row in rows if row.startswith("VmHWM:"))
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return (own + child if child > own else own) * 1024


def _gpu_memory() -> int | None:
    """The peak of bytes that torch allocated on the GPU; None where it used none."""
    torch = sys.modules.get("torch")
    return torch.cuda.max_memory_allocated() if torch is not None and torch.cuda.is_initialized() else None


def _gpu_name() -> str:
    """The name of the GPU that this rank used; empty if it used none."""
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name() if torch is not None and torch.cuda.is_initialized() else ""


def _inputs(node: GraphNode, artifacts: Mapping[str, InputArtifact]) -> dict[str, Any]:
    """The input artifacts by edge, in the edge's type; None for an absent one, a tuple for a list."""
    inputs: dict[str, Any] = {}
    for name, producers in node_inputs(node, artifacts.__getitem__).items():
        kind = node.op.edges[name].type
        if isinstance(producers, tuple):
            inputs[name] = tuple(kind(producer.path, producer.digest) for producer in producers)
        else:
            inputs[name] = None if producers is None else kind(producers.path, producers.digest)
    return inputs


def _device(requested: str) -> str:
    """The device for a stage: for "auto" it is cuda if the op's run module imports torch, and torch finds a GPU.

    Else it is cpu, or the requested device. Raises ConfigError where that does not exist, or there are more ranks than
    visible GPUs.
    """
    torch = sys.modules.get("torch")
    has_cuda = torch is not None and torch.cuda.is_available()
    if requested == "cuda" and torch is not None and not has_cuda:
        raise ConfigError(NO_GPU)
    if torch is not None and has_cuda and requested != "cpu":
        rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if rank >= count:
            raise ConfigError(
                f"rank {rank} of this machine has no GPU of its own: the stage sees only {count}; set "
                f'launch.nproc = {count}, or launch.device = "cpu"'
            )
        torch.cuda.set_device(rank)
        return "cuda"
    return "cpu"


def _watch(spec: StageSpec, number: int) -> None:
    """End this process soon after another rank failed.

    Python runs signal handlers between two steps of the main thread only, never while it waits in a collective. The
    wake-up descriptor gets the signal's number at once, for the watching thread.
    """
    wake_up, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    os.register_at_fork(
        after_in_child=partial(signal.set_wakeup_fd, -1)
    )  # a forked child must not write its signals there
    threading.Thread(target=_keep_watch, args=(wake_up, spec.results, number), daemon=True).start()


def _keep_watch(wake_up: int, results: Path, number: int) -> None:
    others_ended = False
    while True:
        ready, _, _ = select.select([wake_up], [], [], WATCH_EVERY_S)
        if WORKER in os.environ and number in lost_workers(results):  # others do its shards
            os._exit(EXECUTOR_GONE)
        signalled = wake_up in ready and signal.SIGTERM in os.read(wake_up, 4096)
        stop_requested = is_stop_requested(results)
        if signalled and not stop_requested and not others_ended and ONE_OF_SEVERAL in os.environ:
            others_ended = True
            print(f"rank {number}: another rank has failed; this one ends within {END_WITHIN_S} s", flush=True)
            signal.alarm(END_WITHIN_S)  # kills even if something holds the interpreter lock
        elif others_ended and stop_requested:
            others_ended = False
            signal.alarm(0)


def _report_error(
    result: Path, secrets: Sequence[str], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Write an uncaught exception to the result file; used as sys.excepthook.

    dflow's own errors are shown as a message, others with their traceback.
    """
    now = time.time()
    text = "".join(traceback.format_exception(kind, error, _op_traceback(trace)))
    expected = issubclass(kind, DflowError)
    message = redact(str(error), secrets) or ("out of memory" if issubclass(kind, MemoryError) else "")
    reported = RankError(
        name=DiskFull.__name__ if is_full(error) else kind.__name__,
        message=full_at(result.parent) if is_full(error) else message,
        time=now,
        lost_connection=_lost_connection(error),
        names=error_names(error),
        trace=() if expected else tuple(redact(text, secrets).splitlines()),
    )
    try:
        print(f"{kind.__name__}: {message}" if expected else text.rstrip("\n"), file=sys.stderr, flush=True)
        RankResult(status="failed", memory=_memory(), gpu_memory=_gpu_memory(), error=reported).write(result)
    except (OSError, DiskFull):  # the disk is full
        os._exit(NO_SPACE)
    if ONE_OF_SEVERAL in os.environ:
        signal.alarm(END_WITHIN_S)  # the clean-up of a process group may wait for ranks that do not answer


def _op_traceback(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the op's function on; complete where the error is dflow's own."""
    place = trace
    while place is not None and place.tb_frame.f_globals is not globals():
        place = place.tb_next
    while place is not None and place.tb_frame.f_globals is globals():
        place = place.tb_next
    return place or trace


def _lost_connection(error: BaseException | None) -> bool:
    """Whether a rank failed because another one is gone: an error of torch.distributed or gloo."""
    while error is not None:
        names = {ancestor.__name__ for ancestor in type(error).__mro__}
        if "DistError" in names or ("RuntimeError" in names and "gloo/" in str(error)):
            return True
        error = error.__cause__
    return False


if __name__ == "__main__":
    sys.exit(main())
