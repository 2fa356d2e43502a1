"""What MLflow is missing of a run, and sending it. Importing mlflow takes seconds: only sending imports it."""

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

# MLflow's names for the states of runs and nodes; one recorded as running that no longer runs was killed.
STATUS = {"done": "FINISHED", "failed": "FAILED"}
# No telemetry, no messages about migrations, folders allowed as stores, and short time-outs. No automatic
# retries: a run whose creation was not confirmed would be created twice.
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
    """Send what MLflow is missing of a run. The caller holds the record's lock.

    Returns a warning where MLflow cannot be reached, and the numbers of runs, points and files sent.
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
    """See `executor.tracking.run_publisher.Sender`. The caller is the only sender of this run. Raises StoreError
    without MLflow.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise StoreError("mlflow is not installed here, so nothing can be sent to it: install it (pip install mlflow)")
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    from executor.tracking.run_publisher import Sender  # loads mlflow

    return Sender(store, folder, is_live=is_live)


def status_of(state: str) -> str:
    """MLflow's name for the state of a node or a run that does not run."""
    return STATUS.get(state, "KILLED")


def is_tracked(record: Record) -> bool:
    """Whether a run is sent automatically: tracking is on, or it was sent by `dflow sync` before."""
    return record.state.tracking or (record.folder / "mlflow.json").exists()


def lacks(record: Record) -> bool:
    """Whether MLflow is missing something of a run that should be there and is not in progress."""
    sent = read_object(record.folder / "mlflow.json") or {}
    size = record.events_path.stat().st_size if record.events_path.exists() else 0
    is_wanted = (record.state.is_for_mlflow and record.state.tracking) or bool(sent)
    return is_wanted and not is_sent(sent, record, size)


def is_sent(sent: Mapping[str, Any], record: Record, size: int) -> bool:
    """Whether mlflow.json lists everything: all events, the run's end, its report and its models."""
    is_closed = sent.get("parent_status") == status_of(record.state.status)
    made = [sent.get("report"), *(child.get("model") for child in sent.get("nodes", {}).values())]
    return is_closed and sent.get("events") == size and "failed" not in made
