"""Sends a run's record to MLflow: one parent run for the pipeline's run, one child for each of its nodes.

In a sweep, each combination is a run below the parent, and the nodes of only that combination are runs below it.

Everything comes from the record. What was sent is noted in the record's mlflow.json, so that a call sends only
what is missing: while the run is in progress, after a resume, or by `dflow sync` once an unreachable server is back. A
call may fail, or be killed, at any place: a run that MLflow has though mlflow.json does not is found by its tags, and
points that may have been sent already are looked up first.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from itertools import starmap
from pathlib import Path
from typing import Any

from dsl.errors import StageError, StoreError
from dsl.graph import Graph, GraphNode
from executor.records.events import Accepted, EventReader
from executor.records.metric_points import NodeEvents
from executor.records.run_record import NodeState, Record, load_begun
from executor.results.node_params import params
from executor.results.sweep import Combination, combinations
from executor.system.jsonlines import read_object, write_json
from executor.system.output import shown_digest
from executor.tracking.mlflow_client import (
    NOTE,
    UNREACHABLE,
    WHOLE,
    Place,
    Tracker,
    is_passing,
    shown_error,
    tracking_uri,
)
from executor.tracking.node_files import artifacts_read, files_read, node_files
from executor.tracking.publish_results import (
    FAILED,
    CombinationSender,
    send_metrics,
    send_model,
    send_note,
    send_report,
)
from executor.tracking.run_description import run_note
from executor.tracking.sync_state import is_sent, status_of

POINTS_AT_ONCE = 2000
ERROR_LENGTH = 1000
LOCKED_TRIES = 5


class Sender:
    """Sends one run; each call of `send` brings MLflow up to date with the record.

    mlflow.json: {"experiment", "parent", "parent_status", "params_sent", "events", "notes", "report", "nodes": {node:
    {"run_id", "status", "complete", "points", "begun", "retained", "accepted", "failed", "model"}}, "combinations":
    {name: {"run_id", "status", "params_sent", "notes"}}}. events: the size of events.jsonl when all of it was sent.
    points: how many of the node's points MLflow has, begun: how many it may have; retained: how often the key had
    changed by then; failed: MLflow may have an error of it; model: its id, or "failed"; notes: the descriptions that it
    may have; report: when it was sent, or "failed". is_live: it runs now. The caller holds the record's lock.
    """

    def __init__(self, store: Path, folder: Path, *, is_live: bool = False) -> None:
        self._store = store
        self._folder = folder
        self._is_live = is_live
        self._reader = EventReader(folder / "events.jsonl")
        self._events: dict[str, NodeEvents] = {}
        self._graph: Graph | None = None
        self._tracker: Tracker | None = None
        self._combinations: list[Combination] = []
        self._found: dict[Place, list[str]] = {}
        self._warning: str | None = None
        self._is_sure = False  # that mlflow.json names every MLflow run of this run
        self._makers: dict[str, dict[str | None, str]] = {}
        self._tags: dict[str, dict[str, str]] = {}  # of runs, as this sender set them last
        self._sent = _read_sent(folder)

    @property
    def counts(self) -> Counter[str]:
        """Numbers of runs, points and files sent by this sender."""
        return self._tracker.sent if self._tracker is not None else Counter()

    def send(self) -> str | None:
        """Returns a warning where MLflow did not receive everything; the record keeps the rest."""
        self._warning = None
        try:
            record = Record.load(self._folder)
            if self._sent["parent"] is None and not record.state.is_for_mlflow:
                return None
            self._try(record)
        except StoreError as error:
            return f"MLflow lacks a part of the run: {error}; then send it with `dflow sync {self._folder.name}`"
        except UNREACHABLE as error:
            self._is_sure = False
            if "file is not a database" in str(error):
                return (
                    f"{self._store / 'mlflow.db'} is no database: move it away, then send all again with "
                    "`dflow sync --all`"
                )
            what = "cannot be reached" if is_passing(error) else "refused a part of the run"
            kept = f"nothing is lost: send it later with `dflow sync {self._folder.name}`"
            return f"MLflow {what} ({shown_error(error)}); {kept}"
        return self._warning

    def _try(self, record: Record) -> None:
        for left in reversed(range(LOCKED_TRIES)):
            try:
                self._send(record)
            except UNREACHABLE as error:  # SQLite fails at once where waiting could deadlock
                if left == 0 or "database is locked" not in str(error):
                    raise
                self._is_sure = False
                time.sleep(random.uniform(0.1, 1.0))
            else:
                return

    def _send(self, record: Record) -> None:
        if self._graph is None:
            self._graph = record.graph()
            self._combinations = combinations(self._graph)
        graph = self._graph
        if self._tracker is None:
            uri = tracking_uri(self._store, record.state.tracking_uri, graph.root)
            self._tracker = tracker = Tracker(self._store, uri)
            self._forget_what_is_gone(tracker)
        tracker = self._tracker
        is_running = self._is_live and record.state.status == "running"
        size = self._read_events()
        self._makers.clear()
        self._look_around(tracker, record)
        self._send_parent(tracker, record, graph)
        if is_running and self._sent.get("parent_status"):
            tracker.run_again(self._sent["parent"])
            self._sent["parent_status"] = None
        swept = CombinationSender(tracker, record, graph, self._sent, self._save)
        swept.begin(self._combinations, self._made_run)
        for node in graph.nodes.values():
            state = record.state.nodes[node.id]
            if state.state != "pending" or state.attempt:
                self._send_node(tracker, record, graph, node, state)
        for combination in self._combinations:
            swept.end(combination, is_running=is_running)
        if not is_running and not is_sent(self._sent, record, size):
            self._close_parent(tracker, record, graph)
        self._sent["events"] = None if is_running else size
        self._save()

    def _read_events(self) -> int:
        path = self._folder / "events.jsonl"
        size = path.stat().st_size if path.exists() else 0
        for event in self._reader.read():
            self._events.setdefault(event.node, NodeEvents()).add(event)
        return size

    def _forget_what_is_gone(self, tracker: Tracker) -> None:
        """Send everything again where MLflow no longer has the run. Raises StoreError where it was deleted there."""
        parent = self._sent["parent"]
        stage = tracker.stage_of(parent) if parent is not None else None
        if parent is not None and stage is None:
            self._sent = _nothing()
        elif stage == "deleted":
            raise StoreError(f"its run {parent} was deleted in MLflow; restore it there")

    def _look_around(self, tracker: Tracker, record: Record) -> None:
        """Find MLflow runs that an interrupted call created without noting them; duplicates are deleted."""
        if self._is_sure:
            return
        if "experiment" not in self._sent:
            self._sent["experiment"] = tracker.experiment(record.state.experiment)
        self._found = tracker.runs_of(self._sent["experiment"], record.run)
        known = {WHOLE: self._sent["parent"]}
        known |= {("node", name): sent["run_id"] for name, sent in self._sent["nodes"].items()}
        known |= {("combination", name): sent["run_id"] for name, sent in self._sent["combinations"].items()}
        for place, run_ids in self._found.items():
            kept = known.get(place) or run_ids[0]
            for run_id in run_ids:
                if run_id != kept:
                    tracker.delete_run(run_id)
            self._found[place] = [kept]
        self._is_sure = True

    def _made_run(self, tracker: Tracker, place: Place, started: float, tags: Mapping[str, str]) -> str:
        """The existing or a new MLflow run of a node, of a combination, or of the whole run."""
        found = self._found.pop(place, None)
        if found:
            return found[0]
        self._is_sure = False  # until the answer is here
        run_id = tracker.create_run(self._sent["experiment"], started, tags)
        self._is_sure = True
        return run_id

    def _send_parent(self, tracker: Tracker, record: Record, graph: Graph) -> None:
        state = record.state
        if self._sent["parent"] is None:
            note = {NOTE: graph.notes} if graph.notes else {}
            own = {
                "mlflow.runName": f"{state.pipeline} {state.run}",
                "dflow.kind": "sweep" if self._combinations else "run",
                "dflow.pipeline": state.pipeline,
                "dflow.run": state.run,
            }
            self._sent["parent"] = self._made_run(tracker, WHOLE, state.started, {**graph.tags, **note, **own})
            self._sent["notes"] = ["", graph.notes]
            self._save()
        if not self._sent.get("params_sent"):
            shown = {"seed": str(graph.seed)}
            for node in graph.nodes.values():
                if node.copy is None:
                    shown |= {f"{node.id}.{name}": value for name, value in params(node, edges=False).items()}
            tracker.log_params(self._sent["parent"], shown)
            self._sent["params_sent"] = True
            self._save()

    def _close_parent(self, tracker: Tracker, record: Record, graph: Graph) -> None:
        state, parent = record.state, self._sent["parent"]
        alone = [graph.nodes[node_id] for node_id in graph.result_nodes if graph.nodes[node_id].copy is None]
        send_metrics(tracker, parent, self._sent, record, graph, alone)
        self._warning = send_report(tracker, self._store, record, self._sent) or self._warning
        note = run_note(record, graph, self._sent["experiment"], parent)
        send_note(tracker, parent, self._sent, note, self._save)
        status = status_of(state.status)
        tracker.close(parent, status, state.ended or time.time())
        self._sent["parent_status"] = status

    def _send_node(self, tracker: Tracker, record: Record, graph: Graph, node: GraphNode, state: NodeState) -> None:
        events = self._events.get(node.id) or NodeEvents()
        sent = self._sent["nodes"].get(node.id)
        if sent is not None and any(count < sent["begun"] for count in events.retained[sent["retained"] :]):
            tracker.delete_run(sent["run_id"])  # MLflow cannot delete single points
            self._found.pop(("node", node.id), None)
            del self._sent["nodes"][node.id]
            self._save()
            sent = None
        sent = sent or self._made_child(tracker, record, node, state, len(events.retained))
        if not sent.get("complete"):
            tracker.log_params(sent["run_id"], params(node))
            tracker.log_inputs(sent["run_id"], artifacts_read(self._store, record, node))
            sent["complete"] = True
        if state.cache != "hit":
            self._send_points(tracker, sent, events)
        status = "RUNNING" if self._is_live and state.state == "running" else status_of(state.state)
        if status != sent["status"]:
            if status == "RUNNING":
                tracker.run_again(sent["run_id"])
            else:
                self._close_child(tracker, record, node, state, sent, status)
                self._send_model(tracker, graph, node, state)
            sent["status"] = status
            self._save()
        elif sent.get("model") == FAILED and not (self._is_live and record.state.status == "running"):
            self._send_model(tracker, graph, node, state)
            self._judge_again(sent)
        if len(events.accepted) > sent.get("accepted", 0):
            tracker.log_tags(sent["run_id"], {"dflow.accepted": "\n".join(starmap(_accepted, events.accepted))})
            sent["accepted"] = len(events.accepted)
            self._save()

    def _send_model(self, tracker: Tracker, graph: Graph, node: GraphNode, state: NodeState) -> None:
        if state.digest is None or state.state != "done":
            return
        try:
            send_model(tracker, self._store, self._sent, graph, node, state.digest)
        except StageError as error:
            self._sent["nodes"][node.id]["model"] = FAILED
            self._warning = f"MLflow lacks the model of {node.id}: {error}; try it: dflow sync {self._folder.name}"

    def _judge_again(self, sent: Mapping[str, Any]) -> None:
        """Have the final metrics sent again, linked to the model that they evaluate."""
        if sent["model"] != FAILED:
            self._sent["parent_status"] = None
            for combination in self._sent["combinations"].values():
                combination["status"] = None
            self._save()

    def _made_child(
        self, tracker: Tracker, record: Record, node: GraphNode, state: NodeState, retained: int
    ) -> dict[str, Any]:
        started = state.started or record.state.started
        own = next((each for each in self._combinations if node.id in each.own), None)
        parent = self._sent["parent"] if own is None else self._sent["combinations"][own.name]["run_id"]
        identity = {"mlflow.parentRunId": parent, "dflow.run": record.run, "dflow.node": node.id}
        names = {"mlflow.runName": node.id, "dflow.kind": "node", "dflow.op": node.op.name}
        tags = self._state_tags(state)
        was_there = ("node", node.id) in self._found
        run_id = self._made_run(tracker, ("node", node.id), started, {**identity, **names, **tags})
        if not was_there:
            self._tags[run_id] = tags
        begun = len(self._events[node.id].points) if was_there and node.id in self._events else 0
        child: dict[str, Any] = {"run_id": run_id, "status": "RUNNING", "points": 0}
        child |= {"begun": begun, "retained": retained}
        self._sent["nodes"][node.id] = child
        return child

    def _send_points(self, tracker: Tracker, sent: dict[str, Any], events: NodeEvents) -> None:
        while sent["points"] < len(events.points):
            end = min(sent["points"] + POINTS_AT_ONCE, len(events.points))
            some_are_there = sent["begun"] > sent["points"]
            sent["begun"] = max(sent["begun"], end)
            sent["retained"] = len(events.retained)
            self._save()
            tracker.log_points(sent["run_id"], events.points[sent["points"] : end], some_are_there=some_are_there)
            sent["points"] = end
            self._save()

    def _close_child(
        self,
        tracker: Tracker,
        record: Record,
        node: GraphNode,
        state: NodeState,
        sent: dict[str, Any],
        status: str,
    ) -> None:
        run_id = sent["run_id"]
        tags = self._state_tags(state)
        if state.error:
            tags["dflow.error"] = state.error[:ERROR_LENGTH]
            if not sent.get("failed"):
                sent["failed"] = True
                self._save()
        elif sent.get("failed"):
            tracker.delete_tag(run_id, "dflow.error")
            sent["failed"] = False
        if tags != self._tags.get(run_id):
            tracker.log_tags(run_id, tags)
            self._tags[run_id] = tags
        if state.cache == "hit":
            tracker.log_results(run_id, [(state.ended or record.state.started, state.metrics)])
        figures = self._events.get(node.id, NodeEvents()).figures.values()
        tracker.log_files(run_id, *node_files(record, node.id, map(Path, figures)))
        if state.digest is not None:
            read = list(files_read(self._store, node, state.digest))
            tracker.log_inputs(run_id, read)
            tracker.log_inputs(self._sent["parent"], [each for each in read if each.path is not None])
        tracker.close(run_id, status, state.ended or record.state.started)

    def _state_tags(self, state: NodeState) -> dict[str, str]:
        """Tags that may change until the node ends; for a cached node also the run and MLflow run that computed it."""
        tags = {
            "dflow.key": state.key or "",
            "dflow.cache": state.cache or "",
            "dflow.digest": state.digest or "",
        }
        if state.attempt > 1:
            tags["dflow.attempts"] = str(state.attempt)
        if state.acceptance not in ("", "computed"):
            tags["dflow.acceptance"] = state.acceptance
        if state.source_run:
            tags["dflow.source_run"] = state.source_run
            maker = self._children_of(state.source_run).get(state.key)
            if maker is not None:
                tags["dflow.source_mlflow_run"] = maker
        return tags

    def _children_of(self, run: str) -> dict[str | None, str]:
        """The MLflow runs of another run's nodes, by key."""
        if run not in self._makers:
            folder = self._store / "records" / run
            children = (read_object(folder / "mlflow.json") or {}).get("nodes", {})
            maker = load_begun(folder) if children else None
            nodes = maker.state.nodes if maker is not None else {}
            self._makers[run] = {nodes[name].key: sent["run_id"] for name, sent in children.items() if name in nodes}
        return self._makers[run]

    def _save(self) -> None:
        write_json(self._folder / "mlflow.json", self._sent)


def _nothing() -> dict[str, Any]:
    return {"parent": None, "nodes": {}, "combinations": {}}


def _read_sent(folder: Path) -> dict[str, Any]:
    """mlflow.json. An older dflow counted events, in "sent": of its points some are there."""
    sent: dict[str, Any] = read_object(folder / "mlflow.json") or _nothing()
    sent.setdefault("combinations", {})
    for child in sent["nodes"].values():
        child.setdefault("points", 0)
        child.setdefault("begun", 0)
        child["begun"] = max(child["begun"], child.pop("sent", 0))
        child.setdefault("retained", 0)
    return sent


def _accepted(at: float, event: Accepted) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    return f"{when} UTC, {event.user}: {event.reason} (key {shown_digest(event.key)})"
