"""The process beside a run that sends it to MLflow, whose import takes seconds and much memory.

    python -m executor.tracking.publisher_process STORE RECORD PID

PID is the executor's. A line on standard input reports that the run has ended: the rest is sent, and this process ends.
When the executor is gone, it ends at once. Standard output gets a Report a line, in JSON, whenever the warning changes,
and at the end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from dsl.convert import unstructure
from dsl.json_files import compact
from executor.system.supervisor import GONE, end_with_parent
from executor.tracking.report_writer import ReportWriter
from executor.tracking.sync_state import new_run_publisher, sync_lock

EVERY_S = 2.0
RETRY_S = 5.0
# Stages come first. Signals that are sent to all processes are for the executor.
NICE = 5
FOR_EXECUTOR = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@frozen
class Report:
    """warning: what MLflow lacks and why, None where it has everything so far. is_last: nothing more will be sent.

    note: what takes long; it says nothing else.
    """

    warning: str | None
    is_last: bool
    note: str = ""


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
    written = ReportWriter(store, folder)
    threading.Thread(target=_listen, args=(finished, written), daemon=True).start()

    with sync_lock(folder):

        def report(what: Report) -> None:
            os.write(reports, compact(unstructure(what)))

        publisher = new_run_publisher(
            store, folder, written, is_live=True, say=lambda text: report(Report(None, is_last=False, note=text))
        )
        follow(publisher.send, finished, report)
    return 0


def follow(send: Callable[[], str | None], finished: threading.Event, report: Callable[[Report], object]) -> None:
    """Send what the record holds every few seconds, less often while that fails, and once more when it is complete."""
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
    """Not by sys.stdin: a read in progress while Python ends would hold its lock.

    The report of a run that has ended is begun at once: a short run ends while mlflow is still being imported.
    """
    while os.read(0, 1024):
        finished.set()
        written.begin()
    os._exit(GONE)


if __name__ == "__main__":
    sys.exit(main())
