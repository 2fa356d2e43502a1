"""Where a stage runs: a subprocess of its own, or torchrun's ranks, always ended with the executor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs import frozen

from dsl.pipeline import Launch
from executor.failure import cause_of, killed, only_taken_along
from executor.jsonlines import read_json, write_json
from executor.keys import PROJECT
from executor.lease import Lease
from executor.worker import STOP_ASKED, Job

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
LOG_LINES = 20
NOTE = "dflow: "


@frozen
class Outcome:
    """How a stage ended. error is "Class: message", or what the exit code says; log_tail the last lines of the log."""

    status: Literal["done", "stopped", "failed"]
    device: str = "cpu"
    error: str = ""
    log_tail: tuple[str, ...] = ()


def threads_of(launch: Launch) -> int:
    """CPU threads of each rank: as given, else the cores divided by the ranks."""
    return launch.threads or max(1, len(os.sched_getaffinity(0)) // launch.nproc)


class StageProcess:
    """A running stage. Its log gets stdout and stderr of all its processes.

    The life line is a FIFO with the executor as only writer: it breaks when the executor ends, however it ends.
    """

    def __init__(self, lease: Lease, launch: Launch, log: Path, **job: Any) -> None:
        folder = lease.folder
        self._results = folder / f"results-{lease.attempt}"
        self._results.mkdir()
        self._log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        self._noted = self._log_start
        self._nproc = launch.nproc
        self._asked_at: float | None = None
        self._life_line_path = folder / f"alive-{lease.attempt}"
        os.mkfifo(self._life_line_path)
        self._life_line: int | None = os.open(self._life_line_path, os.O_RDWR)
        job_path = folder / f"job-{lease.attempt}.json"
        full_job = Job(
            folder=str(folder),
            token=lease.token,
            lease_id=lease.id,
            out_dir=str(lease.out_dir),
            work_dir=str(lease.work_dir),
            life_line=str(self._life_line_path),
            results=str(self._results),
            device=launch.device,
            sp_degree=launch.sp_degree,
            **job,
        )
        write_json(job_path, attrs.asdict(full_job))
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                _command(launch, job_path, self._results),
                env=stage_environment(threads_of(launch)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def wait(self, seconds: float) -> bool:
        """Whether the stage has ended, after waiting at most this long."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def notes(self) -> list[str]:
        """What the stage printed for the user since the last call: lines that begin with "dflow: ", without that."""
        with self._log.open("rb") as file:
            file.seek(self._noted)
            fresh = file.read()
        whole = fresh[: max(fresh.rfind(b"\n"), fresh.rfind(b"\r")) + 1]
        self._noted += len(whole)
        lines = whole.decode(errors="replace").splitlines()
        return [line.removeprefix(NOTE) for line in lines if line.startswith(NOTE)]

    def ask_to_stop(self) -> None:
        """SIGTERM, once: `stage.stop_requested()` becomes true in every rank (torchrun passes it on)."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            (self._results / STOP_ASKED).touch()
            self._process.send_signal(signal.SIGTERM)

    def asked_for(self) -> float:
        """Seconds since the stage was asked to stop, 0 where it was not."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> Outcome:
        """Break the life line, which ends every rank that still lives, and say how the stage ended."""
        if self._life_line is not None:
            os.close(self._life_line)
            self._life_line = None
            self._life_line_path.unlink(missing_ok=True)
        results = [read_json(self._results / f"{rank}.json") for rank in range(self._nproc)]
        if self._process.returncode == 0 and all(result and result["status"] == "done" for result in results):
            return Outcome("done", results[0]["device"])
        if self._asked_at is not None and only_taken_along(results):
            return Outcome("stopped")
        return Outcome("failed", error=self._error(results), log_tail=self._tail())

    def _error(self, results: Sequence[Mapping[str, Any] | None]) -> str:
        code = self._process.returncode
        cause = cause_of(results, read_json(self._results / "exits.json") or [])
        if cause is not None:
            return cause
        if code < 0:
            return killed(code)
        if any(result and result["status"] == "stopped" for result in results):
            return "StopRequested: the op raised it though nobody had asked it to stop"
        return f"the process ended with exit code {code} and without a result"

    def _tail(self) -> tuple[str, ...]:
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            lines = deque(file, maxlen=LOG_LINES)
        return tuple(line.decode(errors="replace").rstrip() for line in lines)


def _command(launch: Launch, job: Path, results: Path) -> list[str]:
    worker = ["-m", "executor.worker", str(job)]
    if launch.kind == "process":
        return [sys.executable, *worker]
    torchrun = ["-m", "executor.torchrun", str(results), "--standalone", "--nproc-per-node", str(launch.nproc)]
    return [sys.executable, *torchrun, *worker]


def stage_environment(threads: int) -> dict[str, str]:
    """This process's environment with the threads pinned; no `ops` in the working directory can shadow the real one."""
    path = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",  # progress goes through the stage; bars would only fill the log
    }
