"""Sends a run to MLflow while it runs, beside it: importing mlflow takes seconds, and no stage waits for it."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from executor.jsonlines import read_json
from executor.record import Record

EVERY_S = 2.0
RETRY_S = 5.0
POLL_S = 0.2
# How long the end of a run waits for MLflow, and for that of a stopped run, which somebody wants to be over.
END_WITHIN_S = 60.0
STOPPED_WITHIN_S = 15.0
SILENT_S = 3.0
# The states of runs and nodes in MLflow's words; "running" where nothing runs any more was killed.
STATUS = {"done": "FINISHED", "failed": "FAILED"}
# MLflow calls nobody, says nothing of migrations, takes folders too, and gives an absent server up soon. It tries
# nothing again by itself: a run whose making was not answered would be made twice.
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class Display(Protocol):
    """Where the user is told."""

    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...


class Follower:
    """A thread that sends what the record holds every few seconds, until `finish`; more seldom while that fails.

    The user is warned once, when something is wrong for the first time, and told when it is over.
    """

    def __init__(self, store: Path, folder: Path, display: Display) -> None:
        self._store = store
        self._folder = folder
        self._display = display
        self._finished = threading.Event()
        self._is_all_sent = False
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def finish(self, give_up: Callable[[], bool], *, stopped: bool = False) -> None:
        """Send the rest, within a bounded time; what MLflow has not got by then, or by give_up, stays in the record."""
        within = STOPPED_WITHIN_S if stopped else END_WITHIN_S
        started = time.monotonic()
        is_told = False
        self._finished.set()
        while self._thread.is_alive() and not give_up() and time.monotonic() - started < within:
            self._thread.join(POLL_S)
            if not is_told and time.monotonic() - started > SILENT_S:
                self._display.note(f"sending the rest to MLflow, for {within:.0f} s at most (Ctrl-C: leave it)")
                is_told = True
        if self._thread.is_alive() or not self._is_all_sent:
            self._display.note(f"MLflow lacks a part of this run; send it with: dflow sync {self._folder.name}")

    def _follow(self) -> None:
        sender = _sender(self._store, self._folder, is_live=True)
        warning = None
        is_warned = is_last = False
        while not is_last:
            is_last = self._finished.is_set()
            started = time.monotonic()
            warning = sender.send()
            if warning is not None and not is_warned:
                self._display.warn(warning)
                is_warned = True
            elif warning is None and is_warned:
                self._display.note("MLflow is there again and has all of the run until now")
                is_warned = False
            if not is_last:
                late = time.monotonic() - started  # after much was sent, there soon is more
                self._finished.wait(max(EVERY_S / 10, EVERY_S - late) if warning is None else RETRY_S)
        self._is_all_sent = warning is None


def send_in_foreground(store: Path, folder: Path) -> str | None:
    """Send what MLflow lacks of a run; a warning where it cannot be reached. Whoever calls holds the record's lock."""
    return send_rest(store, folder)[0]


def send_rest(store: Path, folder: Path) -> tuple[str | None, Mapping[str, int]]:
    """As send_in_foreground; also how many runs, points and files MLflow was given."""
    sender = _sender(store, folder, is_live=False)
    warning: str | None = sender.send()
    return warning, sender.counts


def status_of(state: str) -> str:
    """What MLflow calls the state of a node, or of a run, that does not run."""
    return STATUS.get(state, "KILLED")


def lacks(record: Record) -> bool:
    """Whether MLflow lacks something of a run in which nothing runs any more."""
    sent = read_json(record.folder / "mlflow.json") or {}
    ran = any(node.cache in ("miss", "resumed") for node in record.state.nodes.values())
    size = record.events_path.stat().st_size if record.events_path.exists() else 0
    return (ran or bool(sent)) and not is_sent(sent, record, size)


def is_sent(sent: Mapping[str, Any], record: Record, size: int) -> bool:
    """By mlflow.json: all events, and how the run ended."""
    return sent.get("parent_status") == status_of(record.state.status) and sent.get("events") == size


def _sender(store: Path, folder: Path, *, is_live: bool) -> Any:
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    return importlib.import_module("executor.sender").Sender(store, folder, is_live=is_live)
