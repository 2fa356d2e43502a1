"""The process beside a run that sends it to MLflow, whose import takes seconds and much memory.

    python -m executor.tracking.publisher_process STORE RECORD PID

PID is the executor's. A line on standard input says that the run has ended: the rest is sent, and that was it. When the
executor is gone, this process ends at once.

Standard output gets a JSON value a line, {"warning": what MLflow lacks and why, or null, "is_last"}: whenever the
warning is another one than before, and at the end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from executor.system.jsonlines import compact
from executor.system.supervisor import GONE, end_with_parent
from executor.tracking.sync_state import new_sender, only_sender

EVERY_S = 2.0
RETRY_S = 5.0
# Stages come first. Signals that are sent to all processes are for the executor.
NICE = 5
FOR_EXECUTOR = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Sends(Protocol):
    """See `executor.tracking.run_publisher.Sender`."""

    def send(self) -> str | None: ...


def main() -> int:
    store, folder, executor = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    for number in FOR_EXECUTOR:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    end_with_parent(executor)
    os.nice(NICE)
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    finished = threading.Event()
    threading.Thread(target=_listen, args=(finished,), daemon=True).start()

    def tell(warning: str | None, is_last: bool) -> None:
        os.write(answers, compact({"warning": warning, "is_last": is_last}))

    with only_sender(folder):
        follow(new_sender(store, folder, is_live=True), finished, tell)
    return 0


def follow(sender: Sends, finished: threading.Event, tell: Callable[[str | None, bool], None]) -> None:
    """Send what the record holds every few seconds, more seldom while that fails, and once more when all is there."""
    told: str | None = None
    is_last = False
    while not is_last:
        is_last = finished.is_set()
        started = time.monotonic()
        warning = sender.send()
        if is_last or warning != told:
            tell(warning, is_last)
            told = warning
        if not is_last:
            late = time.monotonic() - started  # after much was sent, there soon is more
            finished.wait(max(EVERY_S / 10, EVERY_S - late) if warning is None else RETRY_S)


def _listen(finished: threading.Event) -> None:
    """Not by sys.stdin: a read that goes on while Python ends would hold its lock."""
    while os.read(0, 1024):
        finished.set()
    os._exit(GONE)


if __name__ == "__main__":
    sys.exit(main())
