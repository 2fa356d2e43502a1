"""What the tests of MLflow share: a toy's runs, sent from here, and what MLflow holds of them."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from toy_ops import PIPELINE, Toy

from dsl.files import read_json_or_none
from executor.store.artifact_store import Store
from executor.tracking.mlflow_client import open_client, tracking_uri
from executor.tracking.replay import Replay


def client_of(toy: Toy) -> MlflowClient:
    """An MLflow client for the database in a toy's store, whose pipelines name no server."""
    return open_client(toy.store, tracking_uri(toy.store, None, toy.folder))


def tracked_toy(folder: Path, pipeline: str = PIPELINE, *, tracked: bool = True) -> Toy:
    """A toy whose store already has MLflow's database: creating one takes longer than most runs."""
    toy = Toy(folder, pipeline, tracked=tracked)
    Store.open(toy.store, write=True)
    (toy.store / "mlflow.db").write_bytes(fresh_database())
    return toy


@functools.cache
def fresh_database() -> bytes:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        open_client(folder, f"sqlite:///{folder / 'mlflow.db'}")
        return (folder / "mlflow.db").read_bytes()


def newest_record(toy: Toy) -> Path:
    return toy.store / "records" / toy.state()["run"]


def send(toy: Toy, record: Path, *, is_live: bool = False) -> None:
    assert (said := Replay(toy.store, record, is_live=is_live).send()) is None, said


def ids(record: Path) -> tuple[str, dict[str, str]]:
    """The MLflow run of a run of dflow, and those of its nodes."""
    sent = read_json_or_none(record / "mlflow.json")
    assert sent is not None
    return sent["parent"], {name: node["run_id"] for name, node in sent["nodes"].items()}


def child(toy: Toy, record: Path, node: str) -> Run:
    return client_of(toy).get_run(ids(record)[1][node])


def history(client: MlflowClient, run_id: str, name: str) -> list[tuple[int, float, int]]:
    return [(point.step, point.value, point.timestamp) for point in client.get_metric_history(run_id, name)]


def artifacts(client: MlflowClient, run_id: str, path: str | None = None) -> list[str]:
    found: list[str] = []
    for entry in client.list_artifacts(run_id, path):
        found += artifacts(client, run_id, entry.path) if entry.is_dir else [entry.path]
    return sorted(found)


def copied(record: Path, name: str) -> Path:
    """A copy of a record under another id."""
    copy = record.with_name(f"{record.name}-{name}")
    shutil.copytree(record, copy)
    (copy / "events.jsonl").write_text((copy / "events.jsonl").read_text().replace(record.name, copy.name))
    return copy


def accepted(node: str) -> dict[str, Any]:
    """The event that `dflow accept` writes."""
    return {
        "time": 1.78e9, "node": node, "attempt": 0, "kind": "accepted", "key": "k" * 64, "digest": "d" * 64,
        "reason": "only renamed", "user": "ann",
    }  # fmt: skip
