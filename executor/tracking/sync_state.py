"""What MLflow lacks of a run, and sending it. Importing mlflow takes seconds: it is loaded where something is sent."""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsl.errors import StoreError
from executor.records.run_record import Record
from executor.system.jsonlines import read_object
from executor.system.symlinks import open_own

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


def send_rest(store: Path, folder: Path) -> tuple[str | None, Mapping[str, int]]:
    """Send what MLflow lacks of a run. The caller holds the record's lock.

    Returns a warning where MLflow cannot be reached, and how many runs, points and files it was given.
    """
    with only_sender(folder):
        sender = new_sender(store, folder, is_live=False)
        warning: str | None = sender.send()
        return warning, sender.counts


@contextmanager
def only_sender(folder: Path) -> Iterator[None]:
    """Wait until no other process sends this run.

    The process beside a run ends with its executor, but not at the same moment: the record's lock may be free before.
    """
    with os.fdopen(open_own(folder / "mlflow.lock", os.O_WRONLY | os.O_CREAT), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def new_sender(store: Path, folder: Path, *, is_live: bool) -> Any:
    """See `executor.tracking.run_publisher.Sender`. Whoever calls is the only sender of this run. Raises StoreError
    without MLflow.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise StoreError("mlflow is not installed here, so nothing can be sent to it: install it (pip install mlflow)")
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    from executor.tracking.run_publisher import Sender  # loads mlflow

    return Sender(store, folder, is_live=is_live)


def status_of(state: str) -> str:
    """What MLflow calls the state of a node, or of a run, that does not run."""
    return STATUS.get(state, "KILLED")


def is_tracked(record: Record) -> bool:
    """Whether a run is sent by itself: tracking is on, or somebody has sent it by `dflow sync` nevertheless."""
    return record.state.tracking or (record.folder / "mlflow.json").exists()


def lacks(record: Record) -> bool:
    """Whether MLflow lacks something that it is to have of a run in which nothing runs any more."""
    sent = read_object(record.folder / "mlflow.json") or {}
    size = record.events_path.stat().st_size if record.events_path.exists() else 0
    is_wanted = (record.state.is_for_mlflow and record.state.tracking) or bool(sent)
    return is_wanted and not is_sent(sent, record, size)


def is_sent(sent: Mapping[str, Any], record: Record, size: int) -> bool:
    """By mlflow.json: all events, how the run ended, its report and its models."""
    is_closed = sent.get("parent_status") == status_of(record.state.status)
    made = [sent.get("report"), *(child.get("model") for child in sent.get("nodes", {}).values())]
    return is_closed and sent.get("events") == size and "failed" not in made
