"""Sends a run to MLflow while it runs, beside it: importing mlflow takes seconds, and no stage waits for it."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from executor.jsonlines import read_json
from executor.record import Record

EVERY_S = 2.0
RETRY_S = 15.0
GIVE_UP_POLL_S = 0.2
# The states of runs and nodes in MLflow's words.
STATUS = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "pending": "KILLED"}
# MLflow calls nobody, says nothing of migrations, and gives an absent server up soon.
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
}


class Follower:
    """A thread that sends what the record holds every few seconds, until `finish`; more seldom while that fails."""

    def __init__(self, store: Path, record: Path) -> None:
        self._store = store
        self._record = record
        self._finished = threading.Event()
        self._warning: str | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def finish(self, give_up: Callable[[], bool]) -> str | None:
        """Send the rest. Returns a warning where MLflow could not be reached; the record keeps what is missing."""
        self._finished.set()
        while self._thread.is_alive():
            if give_up():
                return "MLflow did not get all of the run; send the rest with `dflow sync`"
            self._thread.join(GIVE_UP_POLL_S)
        return self._warning

    def _follow(self) -> None:
        sender = _sender(self._store, self._record, is_live=True)
        is_last = False
        while not is_last:
            is_last = self._finished.wait(EVERY_S if self._warning is None else RETRY_S)
            self._warning = sender.send()


def send_in_foreground(store: Path, record: Path) -> str | None:
    """Send what MLflow lacks of a run; a warning where it cannot be reached."""
    warning: str | None = _sender(store, record, is_live=False).send()
    return warning


def lacks(record: Record) -> bool:
    """Whether MLflow lacks the end of a run in which nothing runs any more."""
    sent = read_json(record.folder / "mlflow.json") or {}
    ran = any(node.cache in ("miss", "resumed") for node in record.state.nodes.values())
    return (ran or bool(sent)) and sent.get("parent_status") != STATUS[record.state.status]


def _sender(store: Path, record: Path, *, is_live: bool) -> Any:
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    return importlib.import_module("executor.track").Sender(store, record, is_live=is_live)
