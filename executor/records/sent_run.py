"""mlflow.json of a record: what MLflow has of a run. Written before and after each call, so that a killed one is
continued: `points` counts what arrived, `begun` what may have arrived.
"""

from __future__ import annotations

from pathlib import Path

from attrs import define, field

from dsl.convert import structure, unstructure
from dsl.errors import StructureError
from dsl.json_files import read_object, write_json
from executor.records.run_record import Record

FILE = "mlflow.json"
VIEW = "dflow"  # the key of the view of an experiment's runs in MLflow's page
# Without this in an address, MLflow's page takes an experiment for a GenAI one: it shows no runs, or not as such.
TRAINING = "workflowType=machine_learning"
FAILED = "failed"  # a model or a report that could not be made; it is tried again


@define
class Upload:
    """What MLflow has of a whole artifact: its first files, in their order, or all."""

    digest: str
    files: int = 0
    is_complete: bool = False


@define
class SentNode:
    """An MLflow run of a node. complete: its parameters and inputs were sent; points: how many of the node's points
    MLflow has; begun: how many it may have; retained: how often the key had changed by then; accepted: how many
    acceptances it has; failed: it may have an error of the node; model: the logged model's id, or FAILED.
    """

    run_id: str
    status: str = "RUNNING"
    complete: bool = False
    points: int = 0
    begun: int = 0
    retained: int = 0
    accepted: int = 0
    failed: bool = False
    model: str | None = None
    upload: Upload | None = None


@define
class SentCombination:
    """An MLflow run of a combination of a sweep. status: None where its final metrics must be sent again."""

    run_id: str
    status: str | None = "RUNNING"
    params_sent: bool = False
    notes: tuple[str, ...] = ("",)


@define
class SentRun:
    """experiment, parent: ids in MLflow, empty until they are known. parent_status: None while the run is open.

    events: the size of events.jsonl when all of it was sent. notes: the descriptions that MLflow may have, newest last.
    report: when it was sent, in seconds since 1970, or FAILED.
    """

    experiment: str = ""
    parent: str = ""
    parent_status: str | None = None
    params_sent: bool = False
    events: int | None = None
    notes: tuple[str, ...] = ("",)
    report: float | str | None = None
    nodes: dict[str, SentNode] = field(factory=dict)
    combinations: dict[str, SentCombination] = field(factory=dict)

    @classmethod
    def read(cls, folder: Path) -> SentRun | None:
        """None where nothing was sent, or the file is damaged: then the runs are found by their tags."""
        data = read_object(folder / FILE)
        try:
            return None if data is None else structure(cls, data)
        except StructureError:
            return None

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, unstructure(self))

    def run_id(self, node: str) -> str | None:
        """The id of a node's MLflow run."""
        return self.nodes[node].run_id if node in self.nodes else None

    @property
    def has_failed(self) -> bool:
        """Whether the report or a model could not be made."""
        return FAILED in (self.report, *(node.model for node in self.nodes.values()))


def sent_of(record: Record) -> SentRun:
    """What was sent of a run; of a fully cached one, of the run with its results. An empty one for nothing."""
    sent = SentRun.read(record.folder)
    if sent is None and record.state.results_run not in (None, record.run):
        sent = SentRun.read(record.folder.with_name(str(record.state.results_run)))
    return sent or SentRun()
