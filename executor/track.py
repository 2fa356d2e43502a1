"""Sends a run's record to MLflow; the only module that imports mlflow.

Everything comes from the record: one parent run for the pipeline's run, one child for each of its nodes. What was sent
is put down in the record's mlflow.json, so that a call sends only what is missing: while the run goes on, after it was
resumed, or by `dflow sync` once an unreachable server is back.
"""

from __future__ import annotations

import fcntl
import json
import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow.exceptions
import sqlalchemy.exc
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from dsl.graph import Graph, GraphNode
from dsl.op import Ref
from executor.content import MANIFEST
from executor.jsonlines import LineReader, read_json, write_json
from executor.record import NodeState, Record, valid_points

FILE_LIMIT = 1 << 20  # larger files of an artifact stand in references.json instead
METRICS_IN_A_BATCH = 1000
PARAMS_IN_A_BATCH = 100
PARAM_LENGTH = 6000
DIGEST_LENGTH = 36  # of a dataset
UNREACHABLE = (mlflow.exceptions.MlflowException, sqlalchemy.exc.SQLAlchemyError, OSError)
STATUS = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "pending": "KILLED"}


class Sender:
    """Sends one run; each call of `send` brings MLflow up to what the record holds by then.

    mlflow.json: {"parent", "parent_status", "nodes": {node: {"run_id", "status", "sent": number of its metric and cut
    events that were sent}}}
    """

    def __init__(self, store: Path, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self._reader = LineReader(folder / "events.jsonl")
        self._events: dict[str, list[dict[str, Any]]] = {}
        self._figures: dict[str, dict[str, str]] = {}
        self._graph: Graph | None = None
        self._client: MlflowClient | None = None
        self._sent: dict[str, Any] = read_json(folder / "mlflow.json") or {"parent": None, "nodes": {}}

    def send(self) -> str | None:
        """Returns a warning where MLflow cannot be reached; the record keeps what is missing."""
        record = Record.load(self._folder)
        if all(node.cache in (None, "hit") for node in record.state.nodes.values()):
            return None
        is_running = record.state.status == "running" and record.is_alive()
        try:
            self._send(record, is_running)
        except UNREACHABLE as error:
            reason = str(error).splitlines()[0][:300]
            return f"MLflow cannot be reached ({reason}); nothing is lost: send it later with `dflow sync {record.run}`"
        return None

    def client(self, uri: str | None) -> MlflowClient:
        """A client; a database is made or migrated under a lock, since two processes at once would fail."""
        logging.getLogger("alembic").setLevel(logging.WARNING)
        with (self._store / "mlflow.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            client = MlflowClient(tracking_uri=uri or f"sqlite:///{self._store / 'mlflow.db'}")
            client.search_experiments(max_results=1)
        return client

    def _send(self, record: Record, is_running: bool) -> None:
        graph = self._graph = self._graph or record.graph()
        client = self._client = self._client or self.client(record.state.tracking_uri)
        self._read_events()
        if self._sent["parent"] is None:
            self._create_parent(client, record, graph)
        elif is_running and self._sent.get("parent_status"):
            client.update_run(self._sent["parent"], status="RUNNING")
            self._sent["parent_status"] = None
        for node in graph.nodes.values():
            state = record.state.nodes[node.id]
            if state.state != "pending" or state.attempt:
                self._send_node(client, record, node, state)
        if not is_running and not self._sent.get("parent_status"):
            self._close_parent(client, record, graph)
        self._save()

    def _read_events(self) -> None:
        for event in self._reader.read():
            if event["kind"] in ("metric", "cut"):
                self._events.setdefault(event["node"], []).append(event)
            elif event["kind"] == "figure":
                self._figures.setdefault(event["node"], {})[event["name"]] = event["path"]

    def _create_parent(self, client: MlflowClient, record: Record, graph: Graph) -> None:
        state = record.state
        experiment = _experiment(client, self._store, state.experiment, state.tracking_uri)
        tags = {
            "mlflow.runName": f"{state.pipeline} {state.run}",
            "dflow.pipeline": state.pipeline,
            "dflow.run": state.run,
        }
        run = client.create_run(experiment, start_time=_milliseconds(state.started), tags=tags)
        self._sent.update(parent=run.info.run_id, experiment=experiment)
        self._save()
        params = {"pipeline": state.pipeline, "seed": str(graph.seed)}
        for node in graph.nodes.values():
            params |= {f"{node.id}.{name}": value for name, value in _params(node).items()}
        _log_params(client, run.info.run_id, params)

    def _close_parent(self, client: MlflowClient, record: Record, graph: Graph) -> None:
        state = record.state
        read = {parent for node in graph.nodes.values() for parent in node.parents}
        ended = state.ended or time.time()
        for node_id, node in state.nodes.items():
            if node_id not in read and node.state == "done":
                _log_metrics(client, self._sent["parent"], _final(node, ended))
        status = STATUS.get(state.status, "KILLED")  # "running" though no process works on it: it was killed
        client.set_terminated(self._sent["parent"], status=status, end_time=_milliseconds(ended))
        self._sent["parent_status"] = status

    def _send_node(self, client: MlflowClient, record: Record, node: GraphNode, state: NodeState) -> None:
        sent = self._sent["nodes"].get(node.id)
        events = self._events.get(node.id, [])
        before = valid_points(events[: sent["sent"]]) if sent else []
        points = valid_points(events)
        if sent and points[: len(before)] != before:  # MLflow cannot take single points back
            client.delete_run(sent["run_id"])
            sent, before = None, []
        if sent is None:
            sent = self._create_child(client, record, node, state)
            self._save()
        if state.cache != "hit":
            _log_metrics(
                client, sent["run_id"], [point for event in points[len(before) :] for point in _metrics(event)]
            )
            sent["sent"] = len(events)
        status = "RUNNING" if state.state == "running" and record.is_alive() else STATUS.get(state.state, "KILLED")
        if status == sent["status"]:
            return
        if status == "RUNNING":
            client.update_run(sent["run_id"], status=status)
        else:
            self._close_child(client, record, node, state, sent["run_id"], status)
        sent["status"] = status
        self._save()

    def _create_child(self, client: MlflowClient, record: Record, node: GraphNode, state: NodeState) -> dict[str, Any]:
        started = state.started or record.state.started
        tags = {
            "mlflow.parentRunId": self._sent["parent"],
            "mlflow.runName": node.id,
            "dflow.node": node.id,
            "dflow.op": node.op.name,
            "dflow.key": state.key or "",
            "dflow.cache": state.cache or "",
            "dflow.digest": state.digest or "",
        }
        if state.source_run:
            tags["dflow.source_run"] = state.source_run
        run = client.create_run(self._sent["experiment"], start_time=_milliseconds(started), tags=tags)
        _log_params(client, run.info.run_id, _params(node))
        datasets = _datasets(record, self._store, node)
        if datasets:
            client.log_inputs(run.info.run_id, datasets=datasets)
        child: dict[str, Any] = {"run_id": run.info.run_id, "status": "RUNNING", "sent": 0}
        self._sent["nodes"][node.id] = child
        return child

    def _close_child(
        self, client: MlflowClient, record: Record, node: GraphNode, state: NodeState, run_id: str, status: str
    ) -> None:
        ended = state.ended or record.state.started
        tags = [RunTag("dflow.digest", state.digest or ""), RunTag("dflow.cache", state.cache or "")]
        client.log_batch(run_id, tags=tags)
        if state.cache == "hit":
            _log_metrics(client, run_id, _final(state, ended))
        elif record.log_path(node.id).exists():
            client.log_artifact(run_id, str(record.log_path(node.id)))
        for path in self._figures.get(node.id, {}).values():
            client.log_artifact(run_id, path, "figures")
        if state.digest is not None:
            _log_files(client, run_id, self._store / "objects" / state.digest, with_files=state.cache != "hit")
        client.set_terminated(run_id, status=status, end_time=_milliseconds(ended))

    def _save(self) -> None:
        write_json(self._folder / "mlflow.json", self._sent)


def _experiment(client: MlflowClient, store: Path, name: str, uri: str | None) -> str:
    with (store / "mlflow.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = client.get_experiment_by_name(name)
        if known is not None:
            return str(known.experiment_id)
        location = (store / "mlartifacts").as_uri() if uri is None else None
        return str(client.create_experiment(name, artifact_location=location))


def _params(node: GraphNode) -> dict[str, str]:
    """The flat config and how the node was launched."""
    params: dict[str, str] = {"op": node.op.name}
    for name in (*node.op.edges, *node.op.fields):
        params |= _flat(name, getattr(node.config, name))
    for name in ("kind", "nproc", "device", "threads"):
        params |= _flat(f"launch.{name}", getattr(node.launch, name))
    return params


def _flat(name: str, value: Any) -> dict[str, str]:
    if isinstance(value, dict):
        return {key: text for part, member in value.items() for key, text in _flat(f"{name}.{part}", member).items()}
    if isinstance(value, tuple):
        value = [str(member) if isinstance(member, Ref) else member for member in value]
    text = value if isinstance(value, str) else str(value)
    return {name: text[:PARAM_LENGTH]}


def _log_params(client: MlflowClient, run_id: str, params: Mapping[str, str]) -> None:
    listed = [Param(name, value) for name, value in params.items()]
    for start in range(0, len(listed), PARAMS_IN_A_BATCH):
        client.log_batch(run_id, params=listed[start : start + PARAMS_IN_A_BATCH])


def _metrics(event: Mapping[str, Any]) -> list[Metric]:
    stamp = _milliseconds(event["time"])
    return [Metric(name, value, stamp, event["step"]) for name, value in event["metrics"].items()]


def _final(state: NodeState, when: float) -> list[Metric]:
    return [Metric(name, value, _milliseconds(when), 0) for name, value in state.metrics.items()]


def _log_metrics(client: MlflowClient, run_id: str, metrics: Sequence[Metric]) -> None:
    for start in range(0, len(metrics), METRICS_IN_A_BATCH):
        client.log_batch(run_id, metrics=metrics[start : start + METRICS_IN_A_BATCH])


def _datasets(record: Record, store: Path, node: GraphNode) -> list[DatasetInput]:
    inputs = []
    for edge, producers in node.inputs.items():
        for producer in producers:
            digest = record.state.nodes[producer].digest or ""
            source = json.dumps({"path": str(store / "objects" / digest), "digest": digest})
            dataset = Dataset(producer, digest[:DIGEST_LENGTH], "dflow", source)
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", edge)]))
    return inputs


def _log_files(client: MlflowClient, run_id: str, folder: Path, *, with_files: bool) -> None:
    """The manifest; then all small files, and for the others where they are and what they hold."""
    client.log_artifact(run_id, str(folder / MANIFEST))
    if not with_files:
        return
    files = read_json(folder / MANIFEST)["files"]
    large = {name: entry for name, entry in files.items() if entry["size"] > FILE_LIMIT}
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary)
        for name in files.keys() - large.keys():
            (top / "artifact" / name).parent.mkdir(parents=True, exist_ok=True)
            (top / "artifact" / name).symlink_to(folder / name)
        if large:
            references = {name: {**entry, "path": str(folder / name)} for name, entry in large.items()}
            write_json(top / "references.json", references)
        client.log_artifacts(run_id, str(top))


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
