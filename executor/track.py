"""Sends a run's record to MLflow; the only module that imports mlflow.

Everything comes from the record: one parent run for the pipeline's run, one child for each of its nodes. What was sent
is put down in the record's mlflow.json, so that a call sends only what is missing: while the run goes on, after it was
resumed, or by `dflow sync` once an unreachable server is back. A call may fail, or be killed, at any place: a run that
MLflow has though mlflow.json does not is found by its tags, and whatever may have been sent already is sent again only
where MLflow filters what is the same.
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
from executor.follow import STATUS
from executor.jsonlines import LineReader, read_json, write_json
from executor.record import NodeState, Record, valid_points

FILE_LIMIT = 1 << 20  # larger files of an artifact stand in references.json instead
METRICS_IN_A_BATCH = 1000
PARAMS_IN_A_BATCH = 100
PARAM_LENGTH = 6000
DIGEST_LENGTH = 36  # of a dataset
UNREACHABLE = (mlflow.exceptions.MlflowException, sqlalchemy.exc.SQLAlchemyError, OSError)


class Sender:
    """Sends one run; each call of `send` brings MLflow up to what the record holds by then.

    mlflow.json: {"experiment", "parent", "parent_status", "params_sent", "nodes": {node: {"run_id", "status",
    "params_sent", "inputs_sent", "sent", "begun"}}}. sent is the number of the node's metric and cut events that MLflow
    has, begun of those that it may have. is_live: the run is at work now, in this process.
    """

    def __init__(self, store: Path, folder: Path, *, is_live: bool = False) -> None:
        self._store = store
        self._folder = folder
        self._is_live = is_live
        self._reader = LineReader(folder / "events.jsonl")
        self._events: dict[str, list[dict[str, Any]]] = {}
        self._figures: dict[str, dict[str, str]] = {}
        self._graph: Graph | None = None
        self._client: MlflowClient | None = None
        self._sent: dict[str, Any] = read_json(folder / "mlflow.json") or {"parent": None, "nodes": {}}

    def send(self) -> str | None:
        """Returns a warning where MLflow cannot be reached; the record keeps what is missing."""
        record = Record.load(self._folder)
        if self._sent["parent"] is None and all(node.cache in (None, "hit") for node in record.state.nodes.values()):
            return None
        is_running = self._is_live and record.state.status == "running"
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
            self._create_parent(client, record)
        if not self._sent.get("params_sent"):
            self._send_parent_params(client, record, graph)
        if is_running and self._sent.get("parent_status"):
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

    def _create_parent(self, client: MlflowClient, record: Record) -> None:
        state = record.state
        experiment = _experiment(client, self._store, state.experiment, state.tracking_uri)
        tags = {
            "mlflow.runName": f"{state.pipeline} {state.run}",
            "dflow.pipeline": state.pipeline,
            "dflow.run": state.run,
        }
        run_id = _found_run(client, experiment, {"dflow.run": state.run})
        if run_id is None:
            run_id = client.create_run(experiment, start_time=_milliseconds(state.started), tags=tags).info.run_id
        self._sent.update(parent=run_id, experiment=experiment)
        self._save()

    def _send_parent_params(self, client: MlflowClient, record: Record, graph: Graph) -> None:
        params = {"pipeline": record.state.pipeline, "seed": str(graph.seed)}
        for node in graph.nodes.values():
            params |= {f"{node.id}.{name}": value for name, value in _params(node).items()}
        _log_params(client, self._sent["parent"], params)
        self._sent["params_sent"] = True
        self._save()

    def _close_parent(self, client: MlflowClient, record: Record, graph: Graph) -> None:
        state = record.state
        for node_id in graph.result_nodes:
            node = state.nodes[node_id]
            if node.state == "done":  # with a time that stays, so that they are there once
                _log_metrics(client, self._sent["parent"], _final(node, node.ended or state.started))
        ended = state.ended or time.time()
        status = STATUS.get(state.status, "KILLED")  # "running" though no process works on it: it was killed
        client.set_terminated(self._sent["parent"], status=status, end_time=_milliseconds(ended))
        self._sent["parent_status"] = status

    def _send_node(self, client: MlflowClient, record: Record, node: GraphNode, state: NodeState) -> None:
        sent = self._sent["nodes"].get(node.id)
        events = self._events.get(node.id, [])
        points = valid_points(events)
        begun = valid_points(events[: sent.get("begun", sent["sent"])]) if sent else []
        if sent and points[: len(begun)] != begun:  # MLflow cannot take single points back
            self._delete_child(client, node.id)
            sent = None
        if sent is None:
            sent = self._create_child(client, record, node, state)
        self._complete_child(client, record, node, sent)
        if state.cache != "hit" and sent["sent"] < len(events):
            sent["begun"] = len(events)
            self._save()
            fresh = points[len(valid_points(events[: sent["sent"]])) :]
            _log_metrics(client, sent["run_id"], [point for event in fresh for point in _metrics(event)])
            sent["sent"] = len(events)
        is_running = self._is_live and state.state == "running"
        status = "RUNNING" if is_running else STATUS.get(state.state, "KILLED")
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
        identity = {"mlflow.parentRunId": self._sent["parent"], "dflow.run": record.run, "dflow.node": node.id}
        run_id = _found_run(client, self._sent["experiment"], identity)
        if run_id is None:
            tags = {**identity, "mlflow.runName": node.id, "dflow.op": node.op.name, **self._state_tags(state)}
            run = client.create_run(self._sent["experiment"], start_time=_milliseconds(started), tags=tags)
            run_id = run.info.run_id
        child: dict[str, Any] = {"run_id": run_id, "status": "RUNNING", "sent": 0, "begun": 0}
        self._sent["nodes"][node.id] = child
        self._save()
        return child

    def _complete_child(self, client: MlflowClient, record: Record, node: GraphNode, sent: dict[str, Any]) -> None:
        """Params and inputs, once."""
        if not sent.get("params_sent"):
            _log_params(client, sent["run_id"], _params(node))
            sent["params_sent"] = True
            self._save()
        if not sent.get("inputs_sent"):
            datasets = _datasets(record, self._store, node)
            if datasets:
                client.log_inputs(sent["run_id"], datasets=datasets)
            sent["inputs_sent"] = True
            self._save()

    def _delete_child(self, client: MlflowClient, node_id: str) -> None:
        run_id = self._sent["nodes"][node_id]["run_id"]
        if client.get_run(run_id).info.lifecycle_stage == "active":  # else a killed call deleted it
            client.delete_run(run_id)
        del self._sent["nodes"][node_id]
        self._save()

    def _state_tags(self, state: NodeState) -> dict[str, str]:
        """What may change until the node ends; of a cached node, the run and the MLflow run that made it."""
        tags = {
            "dflow.key": state.key or "",
            "dflow.cache": state.cache or "",
            "dflow.digest": state.digest or "",
        }
        if state.source_run:
            tags["dflow.source_run"] = state.source_run
            source = self._store / "records" / state.source_run
            children = (read_json(source / "mlflow.json") or {}).get("nodes", {})
            nodes = Record.load(source).state.nodes if children else {}
            made = [name for name, node in nodes.items() if node.key == state.key and name in children]
            if made:
                tags["dflow.source_mlflow_run"] = children[made[0]]["run_id"]
        return tags

    def _close_child(
        self, client: MlflowClient, record: Record, node: GraphNode, state: NodeState, run_id: str, status: str
    ) -> None:
        ended = state.ended or record.state.started
        client.log_batch(run_id, tags=[RunTag(name, value) for name, value in self._state_tags(state).items()])
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


def _found_run(client: MlflowClient, experiment: str, tags: Mapping[str, str]) -> str | None:
    """The run with these tags, of the same node or of none: a call made it that did not come to put its id down."""
    condition = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
    found = client.search_runs([experiment], condition)
    same = [run.info.run_id for run in found if run.data.tags.get("dflow.node") == tags.get("dflow.node")]
    return str(same[0]) if same else None


def _params(node: GraphNode) -> dict[str, str]:
    """The flat config and how the node was launched."""
    params: dict[str, str] = {"op": node.op.name}
    for name in (*node.op.edges, *node.op.fields):
        params |= _flat(name, getattr(node.config, name))
    for name in ("kind", "nproc", "sp_degree", "device", "threads"):
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
