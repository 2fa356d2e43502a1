"""What MLflow is missing of a run, and sending it. Importing mlflow takes seconds: only sending imports it."""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dsl.errors import StoreError
from dsl.files import open_own
from executor.records.run_record import Record
from executor.records.sent_run import FILE, SentRun
from executor.system.garbage import no_collection

if TYPE_CHECKING:
    from executor.tracking.report_writer import ReportWriter
    from executor.tracking.run_publisher import RunPublisher

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


def send_rest(
    store: Path, folder: Path, say: Callable[[str], object] = lambda text: None
) -> tuple[str | None, Mapping[str, int]]:
    """Send what MLflow is missing of a run. The caller holds the record's lock.

    say: called with what takes long. Returns a warning where MLflow cannot be reached, and the numbers of runs, points
    and files sent.
    """
    with sync_lock(folder):
        publisher = new_run_publisher(store, folder, None, is_live=False, say=say)
        return publisher.send(), publisher.counts


@contextmanager
def sync_lock(folder: Path) -> Iterator[None]:
    """Wait until no other process sends this run.

    The process beside a run ends with its executor, but not at the same moment: the record's lock may be free before.
    """
    with os.fdopen(open_own(folder / "mlflow.lock", os.O_WRONLY | os.O_CREAT), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def new_run_publisher(
    store: Path, folder: Path, report: ReportWriter | None, *, is_live: bool, say: Callable[[str], object]
) -> RunPublisher:
    """The caller is the only publisher of this run. report: writes its report, where that may begin before.

    Raises StoreError without MLflow.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise StoreError("mlflow is not installed here, so nothing can be sent to it: install it (pip install mlflow)")
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    with no_collection():
        from executor.tracking.run_publisher import RunPublisher  # loads mlflow

    return RunPublisher(store, folder, is_live=is_live, report=report, say=say)


def status_of(state: str) -> str:
    """MLflow's name for the state of a node or a run that does not run."""
    return STATUS.get(state, "KILLED")


def is_tracked(record: Record) -> bool:
    """Whether a run is sent automatically: tracking is on, or it was sent by `dflow sync` before."""
    return record.state.tracking or (record.folder / FILE).exists()


def lacks(record: Record) -> bool:
    """Whether MLflow is missing something of a run that should be there and is not in progress."""
    sent = SentRun.read(record.folder)
    size = record.events_path.stat().st_size if record.events_path.exists() else 0
    if sent is None:
        return record.state.is_for_mlflow and record.state.tracking
    return not is_sent(sent, record, size)


def is_sent(sent: SentRun, record: Record, size: int) -> bool:
    """Whether MLflow has everything: all events, the run's end, its report and its models."""
    return sent.parent_status == status_of(record.state.status) and sent.events == size and not sent.has_failed
