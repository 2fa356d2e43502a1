"""The report of a run for MLflow, which is written while the rest of the run is being sent."""

from __future__ import annotations

import threading
from pathlib import Path

from executor.system.supervisor import Finished, run_module

WITHIN_S = 45.0
REPORT = "report.html"


class ReportWriter:
    """Writes it in a process of its own, so that a failing section of an op does not affect the rest.

    file: where it is then, in the record's folder.
    """

    def __init__(self, store: Path, folder: Path) -> None:
        self.file = folder / REPORT
        self._arguments = ("report", folder.name, "--store", str(store), "-o", str(self.file))
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._done: Finished | None = None

    def begin(self) -> None:
        """Start to write it, unless that has begun. The run has ended: its record stays as it is."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, daemon=True)
                self._thread.start()

    def written(self) -> Finished:
        """How it ended. The next call writes it anew, since a run may be continued."""
        self.begin()
        with self._lock:
            assert self._thread is not None
            self._thread.join()
            self._thread = None
        assert self._done is not None
        return self._done

    def _write(self) -> None:
        self._done = run_module("executor.cli", *self._arguments, within_s=WITHIN_S)
