"""Sends a run to MLflow while it runs, beside it: importing mlflow takes seconds, and no stage waits for it."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path

EVERY_S = 2.0


class Follower:
    """A thread that sends what the record holds every few seconds, until `finish`."""

    def __init__(self, store: Path, record: Path) -> None:
        self._store = store
        self._record = record
        self._finished = threading.Event()
        self._warning: str | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def finish(self) -> str | None:
        """Send the rest. Returns a warning where MLflow could not be reached; the record keeps what is missing."""
        self._finished.set()
        self._thread.join()
        return self._warning

    def _follow(self) -> None:
        track = importlib.import_module("executor.track")
        is_last = False
        while not is_last:
            is_last = self._finished.wait(EVERY_S)
            self._warning = track.send_record(self._store, self._record)
            if self._warning is not None:
                return


def send_in_foreground(store: Path, record: Path) -> str | None:
    """Send what MLflow lacks of a run; a warning where it cannot be reached."""
    warning: str | None = importlib.import_module("executor.track").send_record(store, record)
    return warning
