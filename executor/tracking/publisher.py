"""The process beside a run that sends it to MLflow, whose import takes seconds and much memory; and the executor's side
of it, which starts and ends it, and reports to the user.

    python -m executor.tracking.publisher STORE RECORD PID

PID is the executor's. A line on standard input reports that the run has ended: the rest is sent, and this process ends.
When the executor is gone, it ends at once. Standard output gets a Report a line, in JSON, whenever the warning changes,
and at the end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from attrs import frozen

from dsl.convert import structure, unstructure
from dsl.files import compact
from dsl.imports import child_environment, module_command
from executor.system.supervisor import GONE, Finished, end_with_parent, exit_text, run_module
from executor.tracking.sync_state import REPORT, new_replay, sync_lock

# How long the end of a run waits for MLflow, and how long that of a stopped run, whose user wants to leave.
END_WITHIN_S = 60.0
STOPPED_WITHIN_S = 15.0
SILENT_S = 3.0
POLL_S = 0.2
STARTS = 2
COMMAND = module_command("executor.tracking.publisher")
# The process sends as often, and waits after a failure.
EVERY_S = 2.0
RETRY_S = 5.0
NICE = 5  # stages come first
REPORT_WITHIN_S = 150.0  # seconds of work, and more where others use all cores
FOR_EXECUTOR = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # also where they are sent to all processes


@frozen
class Report:
    """A line from the sending process to the executor. warning: what MLflow lacks and why, None for nothing so far.

    is_last: nothing more will be sent. note: what takes long; the line then says nothing else.
    waits: how many seconds more the end of a run waits for that.
    """

    warning: str | None
    is_last: bool
    note: str = ""
    waits: float = 0.0


class Display(Protocol):
    """An interface that shows messages to the user."""

    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def say_last(self, text: str) -> None: ...


class Publisher:
    """A helper that sends a run's record to MLflow every few seconds, by a process of its own, until `finish`.

    The user is warned once, when something first fails, and told when it works again. A process that is killed or
    breaks is replaced once. None is alive when `finish` returns.
    """

    def __init__(self, store: Path, folder: Path, display: Display) -> None:
        self._store = store
        self._folder = folder
        self._display = display
        self._process: subprocess.Popen[bytes] | None = None
        self._is_finishing = self._is_given_up = False
        self._is_all_sent = self._is_warned = False
        self._warning: str | None = None
        self._more_s = 0.0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def finish(self, give_up: Callable[[], bool], *, stopped: bool = False) -> None:
        """Send the rest within a bounded time. What MLflow lacks then, or when give_up says so, stays in the record."""
        within = STOPPED_WITHIN_S if stopped else END_WITHIN_S
        started = time.monotonic()
        is_noted = False
        with self._lock:
            self._is_finishing = True
            self._request_end()
        while self._thread.is_alive() and not give_up() and time.monotonic() - started < within + self._more_s:
            self._thread.join(POLL_S)
            if not is_noted and self._thread.is_alive() and time.monotonic() - started > SILENT_S:
                self._display.note(f"sending the rest to MLflow, for {within:.0f} s at most (Ctrl-C: leave it)")
                is_noted = True
        self._kill()
        self._thread.join()
        if not self._is_all_sent:
            lacks = f"MLflow lacks a part of this run; send it with: dflow sync {self._folder.name}"
            why = f"{self._warning.partition('; ')[0]}; " if self._warning else ""
            self._display.say_last(f"{why}{lacks}")

    def _follow(self) -> None:
        """Start the sending process, receive its reports, and replace it once if it fails.

        Runs in a thread that lives as long as these processes, since they end with it.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, FOR_EXECUTOR)  # inherited by them, until they ignore these
        for _ in range(STARTS):
            try:
                process = self._started()
            except OSError as error:
                self._warn(self._kept(f"cannot be started ({error.strerror})"))
                return
            if process is None:
                return
            with process:
                assert process.stdout is not None
                for line in process.stdout:
                    self._receive(line)
            if process.returncode == 0 or self._is_all_sent or self._is_given_up:
                return
            self._warn(self._kept(exit_text(process.returncode)))

    def _started(self) -> subprocess.Popen[bytes] | None:
        """Start the sending process in its own process group, out of reach of Ctrl-C; None if sending was given up."""
        with self._lock:
            if self._is_given_up:
                return None
            self._process = subprocess.Popen(
                [*COMMAND, str(self._store), str(self._folder), str(os.getpid())],
                env=child_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,
            )
            if self._is_finishing:
                self._request_end()
            return self._process

    def _request_end(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError, ValueError):  # it has ended
                os.write(self._process.stdin.fileno(), b"\n")

    def _kill(self) -> None:
        """Kill the sending process; it is not replaced."""
        with self._lock:
            self._is_given_up = True
            if self._process is not None:
                self._process.kill()

    def _receive(self, line: bytes) -> None:
        if not line.endswith(b"\n"):  # it was killed while it wrote this
            return
        report = structure(Report, json.loads(line))
        if report.note:
            self._display.note(report.note)
            self._more_s = max(self._more_s, report.waits)
            return
        self._warning = report.warning
        self._is_all_sent = report.is_last and self._warning is None
        if self._warning is not None:
            self._warn(self._warning)
        elif self._is_warned:
            self._display.note("MLflow can be reached again and has all of the run so far")
            self._is_warned = False

    def _warn(self, text: str) -> None:
        self._warning = text
        if not self._is_warned:
            self._display.warn(text)
            self._is_warned = True

    def _kept(self, what: str) -> str:
        kept = f"nothing is lost: send it later with `dflow sync {self._folder.name}`"
        return f"the process that sends to MLflow {what}; {kept}"


class ReportWriter:
    """Writes the report of a run in a process of its own, while other files are being sent.

    file: the finished report, in the record's folder.
    """

    def __init__(self, store: Path, folder: Path, waiting: Callable[[], object] | None = None) -> None:
        """waiting: called when only the report is waited for, longer than SILENT_S."""
        self.file = folder / REPORT
        self._waiting = waiting
        self._arguments = ("report", folder.name, "--store", str(store), "-o", str(self.file))
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._done: Finished | None = None

    def begin(self) -> None:
        """Start to write the report, unless that has begun. The run has ended, so its record no longer changes."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, daemon=True)
                self._thread.start()

    def written(self) -> Finished:
        """Wait for the report, and return how its process ended. The next call writes it anew, as a run may
        continue.
        """
        self.begin()
        with self._lock:
            assert self._thread is not None
            self._thread.join(SILENT_S)
            if self._waiting is not None and self._thread.is_alive():
                self._waiting()
            self._thread.join()
            self._thread = None
        assert self._done is not None
        return self._done

    def _write(self) -> None:
        self._done = run_module("executor.cli", *self._arguments, within_s=REPORT_WITHIN_S)


def main() -> int:
    store, folder, executor = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    for number in FOR_EXECUTOR:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    end_with_parent(executor)
    os.nice(NICE)
    reports = os.dup(1)
    os.dup2(2, 1)  # libraries may print to standard output
    finished = threading.Event()

    def report(what: Report) -> None:
        os.write(reports, compact(unstructure(what)))

    about = f"writing the report of the run, for {REPORT_WITHIN_S:.0f} s at most (Ctrl-C: leave it)"
    written = ReportWriter(
        store, folder, lambda: report(Report(None, is_last=False, note=about, waits=REPORT_WITHIN_S))
    )
    threading.Thread(target=_listen, args=(finished, written), daemon=True).start()

    with sync_lock(folder):
        replay = new_replay(
            store, folder, written, is_live=True, say=lambda text: report(Report(None, is_last=False, note=text))
        )
        follow(replay.send, finished, report)
    return 0


def follow(send: Callable[[], str | None], finished: threading.Event, report: Callable[[Report], object]) -> None:
    """Send the record every few seconds, less often while that fails, and a last time when it is complete.

    send: returns a warning or None. finished: set when the record is complete. report: called with each change of
    state.
    """
    reported: str | None = None
    is_last = False
    while not is_last:
        is_last = finished.is_set()
        started = time.monotonic()
        warning = send()
        if is_last or warning != reported:
            report(Report(warning, is_last))
            reported = warning
        if not is_last:
            late = time.monotonic() - started  # sending took long, so there soon is more to send
            finished.wait(max(EVERY_S / 10, EVERY_S - late) if warning is None else RETRY_S)


def _listen(finished: threading.Event, written: ReportWriter) -> None:
    """Watch standard input for the end of the run and of the executor; the report is begun when the run ends.

    It does not use sys.stdin: a read in progress while Python ends would hold its lock. The report starts at once, as a
    short run ends during mlflow's import.
    """
    while os.read(0, 1024):
        finished.set()
        written.begin()
    os._exit(GONE)


if __name__ == "__main__":
    sys.exit(main())
