"""What MLflow has of a run, and sending the rest. Importing mlflow takes seconds: only sending imports it.

mlflow.json of a record names the run's MLflow runs, for commands that do without MLflow. What these hold, MLflow says.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, field

from dsl.convert import structure, unstructure
from dsl.errors import StoreError, StructureError
from dsl.files import known_fields, open_own, read_object_or_none, write_json
from dsl.imports import no_collection
from executor.records.run_record import LOG, Record

if TYPE_CHECKING:
    from executor.tracking.publisher import ReportWriter
    from executor.tracking.replay import Replay

FILE = "mlflow.json"
REPORT = "report.html"
VIEW = "dflow"  # the key of the view of an experiment's runs in MLflow's page
# Without this in an address, MLflow's page takes an experiment for a GenAI one: it shows no runs, or not as such.
TRAINING = "workflowType=machine_learning"
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


@define
class SentPart:
    """The MLflow run of a node or combination, as it was sent. notes: descriptions that dflow may have given it."""

    run_id: str
    notes: tuple[str, ...] = ("",)


@define
class SentRun:
    """The record of what was sent to MLflow. experiment, parent: ids in MLflow, "" until known.

    notes: descriptions that dflow wrote, the newest last. events: size of the log when all of it was sent, None until
    then.
    """

    experiment: str = ""
    parent: str = ""
    events: int | None = None
    notes: tuple[str, ...] = ("",)
    nodes: dict[str, SentPart] = field(factory=dict)
    combinations: dict[str, SentPart] = field(factory=dict)

    @classmethod
    def read(cls, folder: Path) -> SentRun | None:
        """Read the record of what was sent; None without one, or if it is damaged: the runs are then found by their
        tags.
        """
        data = read_object_or_none(folder / FILE)
        if data is None:
            return None
        try:
            for parts in ("nodes", "combinations"):
                found = data.get(parts, {}).items()
                data[parts] = {name: known_fields(SentPart, part) for name, part in found}
            return structure(cls, known_fields(cls, data))
        except (StructureError, AttributeError):
            return None

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, unstructure(self))

    def run_id(self, node: str) -> str | None:
        """The id of a node's MLflow run."""
        return self.nodes[node].run_id if node in self.nodes else None


def sent_of(record: Record) -> SentRun:
    """The record of what was sent of a run; for a fully cached run, of the run with its results. Empty for nothing."""
    sent = SentRun.read(record.folder)
    if sent is None and record.state.results_run not in (None, record.run):
        sent = SentRun.read(record.folder.with_name(str(record.state.results_run)))
    return sent or SentRun()


def send_rest(
    store: Path, folder: Path, say: Callable[[str], object] = lambda text: None
) -> tuple[str | None, Mapping[str, int]]:
    """Send what MLflow lacks of a run. The caller holds the record's lock.

    say: called with a text before each long step. Returns a warning where MLflow cannot be reached, and the counts of
    runs, points and files sent.
    """
    with sync_lock(folder):
        replay = new_replay(store, folder, None, is_live=False, say=say)
        return replay.send(), replay.counts


@contextmanager
def sync_lock(folder: Path) -> Iterator[None]:
    """Hold a lock while sending a run, and wait until no other process sends it.

    The sending process ends with its executor, but not at the same moment: the record's lock may be free earlier.
    """
    with os.fdopen(open_own(folder / "mlflow.lock", os.O_WRONLY | os.O_CREAT), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def new_replay(
    store: Path, folder: Path, report: ReportWriter | None, *, is_live: bool, say: Callable[[str], object]
) -> Replay:
    """A Replay for a run; the caller must be the run's only sender.

    report: writes its report, if that may begin before. Raises StoreError without MLflow.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise StoreError("mlflow is not installed here, so nothing can be sent to it: install it (pip install mlflow)")
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    with no_collection():
        from executor.tracking.replay import Replay  # loads mlflow

    return Replay(store, folder, is_live=is_live, report=report, say=say)


def is_tracked(record: Record) -> bool:
    """Whether a run is sent automatically: tracking is on, or `dflow sync` sent it before."""
    return record.state.tracking or (record.folder / FILE).exists()


def lacks(record: Record) -> bool:
    """Whether MLflow lacks something of a run that belongs there and is not in progress."""
    sent = SentRun.read(record.folder)
    if sent is None:
        return record.state.is_for_mlflow and record.state.tracking
    return sent.events != log_size(record.folder)


def log_size(folder: Path) -> int:
    """The size of a run's log in bytes."""
    path = folder / LOG
    return path.stat().st_size if path.exists() else 0
