"""Sends a run's record to MLflow: one parent run for the pipeline's run, one child for each of its nodes.

In a sweep, each combination is a run below the parent, and the nodes of only that combination are runs below it.

Everything comes from the record. What was sent is written to the record's mlflow.json (records/sent_run.py), so that a
call sends only what is missing: while the run is in progress, after a resume, or by `dflow sync` once an unreachable
server is back. A call may fail, or be killed, at any place: a run that MLflow has though mlflow.json does not is found
by its tags, and points that may have been sent already are looked up first.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import starmap
from pathlib import Path

from dsl.errors import StageError, StoreError
from dsl.finding import for_run
from dsl.graph import Graph, GraphNode
from dsl.secrets import redact, secret_names, values_of
from dsl.sizes import shown_bytes
from dsl.tables import TABLE_NAMES
from executor.records.duration import run_seconds
from executor.records.events import Accepted, EventReader
from executor.records.metric_points import NodeEvents
from executor.records.record_trust import require_own_store
from executor.records.run_record import NodeState, Record, load_begun
from executor.records.sent_run import FAILED, SentNode, SentRun, Upload
from executor.results.node_params import params
from executor.results.sweep import Combination, combinations
from executor.system.garbage import no_collection
from executor.system.output import counted, shown_digest
from executor.system.symlinks import is_plain
from executor.tracking.mlflow_client import (
    NOTE,
    UNREACHABLE,
    WHOLE,
    Place,
    Tracker,
    check_trusted,
    is_transient,
    shown_error,
    tracking_uri,
)
from executor.tracking.node_files import artifacts_read, files_read, node_files, whole_artifact
from executor.tracking.publish_results import (
    CombinationPublisher,
    send_best,
    send_metrics,
    send_model,
    send_note,
    send_report,
    short_name,
)
from executor.tracking.report_writer import ReportWriter
from executor.tracking.run_description import maker_tags, run_name, run_note, shown_notes
from executor.tracking.sync_state import is_sent, status_of

POINTS_AT_ONCE = 2000
ERROR_LENGTH = 1000
LOCKED_TRIES = 15


class RunPublisher:
    """Sends one run; each call of `send` brings MLflow up to date with the record.

    is_live: the run is in progress. report: writes its report, which may begin before MLflow is there. counts: numbers
    of runs, points and files sent. say: called with what takes long. The caller holds the record's lock.
    """

    def __init__(
        self,
        store: Path,
        folder: Path,
        *,
        is_live: bool = False,
        report: ReportWriter | None = None,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._store = store
        self._folder = folder
        self._is_live = is_live
        self._report = report or ReportWriter(store, folder)
        self._say = say
        self._reader = EventReader(folder / "events.jsonl")
        self._events: dict[str, NodeEvents] = {}
        self._found: dict[Place, list[str]] = {}
        self._warning: str | None = None
        self._is_sure = False  # that mlflow.json names every MLflow run of this run
        self._makers: dict[str, dict[str | None, str]] = {}
        self._tags: dict[str, dict[str, str]] = {}  # of runs, as this sender set them last
        self._sent = SentRun.read(folder) or SentRun()

    def send(self) -> str | None:
        """Returns a warning where MLflow did not receive everything; the record keeps the rest.

        It shows no secret of the tracking URI, wherever that stands in the URI.
        """
        warning = self._sent_or_warned()
        return None if warning is None else redact(warning, self._secrets)

    def _sent_or_warned(self) -> str | None:
        self._warning = None
        self._secrets: tuple[str, ...] = ()
        try:
            self._record = Record.load(self._folder)
            if not self._sent.parent and not self._record.state.is_for_mlflow:
                return None
            self._secrets = values_of(secret_names(self._record.state.tracking_uri or ""))
            self._try()
        except StoreError as error:
            return f"MLflow lacks a part of the run: {error}; then send it with `dflow sync {self._folder.name}`"
        except UNREACHABLE as error:
            self._is_sure = False
            if "file is not a database" in str(error):
                return (
                    f"{self._store / 'mlflow.db'} is no database: move it away, then send all again with "
                    "`dflow sync --all`"
                )
            what = "cannot be reached" if is_transient(error) else "refused a part of the run"
            kept = f"nothing is lost: send it later with `dflow sync {self._folder.name}`"
            return f"MLflow {what} ({shown_error(error)}); {kept}"
        return self._warning

    def _try(self) -> None:
        for tries_left in reversed(range(LOCKED_TRIES)):
            try:
                self._send()
            except UNREACHABLE as error:  # SQLite fails at once where waiting could deadlock
                if tries_left == 0 or "database is locked" not in str(error):
                    raise
                self._is_sure = False
                time.sleep(random.uniform(0.1, 1.0))
            else:
                return

    @cached_property
    def _graph(self) -> Graph:
        return self._record.graph()

    @cached_property
    def _combinations(self) -> list[Combination]:
        return combinations(self._graph)

    @cached_property
    def _tracker(self) -> Tracker:
        """Sends everything again where MLflow no longer has the run. Raises StoreError where it was deleted there."""
        require_own_store(self._store)
        check_trusted(self._record.state.tracking_uri or "", self._record.run)
        uri = tracking_uri(self._store, self._record.state.tracking_uri, self._graph.root)
        with no_collection():  # MLflow imports the rest of itself
            tracker = Tracker(self._store, uri, self.counts, self._say)
        parent = self._sent.parent
        stage = tracker.stage_of(parent) if parent else None
        if stage == "deleted":
            raise StoreError(f"its run {parent} was deleted in MLflow; restore it there")
        if parent and stage is None:
            self._sent = SentRun()
        return tracker

    def _send(self) -> None:
        state, tracker = self._record.state, self._tracker
        is_running = self._is_live and state.status == "running"
        size = self._read_events()
        self._makers.clear()
        self._find_runs()
        self._send_parent()
        if is_running and self._sent.parent_status:
            tracker.run_again(self._sent.parent)
            self._sent.parent_status = None
        swept = CombinationPublisher(tracker, self._record, self._graph, self._sent, self._save)
        swept.begin(self._combinations, self._made_run)
        for node in self._graph.nodes.values():
            node_state = state.nodes[node.id]
            if node_state.state != "pending" or node_state.attempt:
                self._send_node(node, node_state)
        for combination in self._combinations:
            swept.end(combination, is_running=is_running)
        if not is_running and not is_sent(self._sent, self._record, size):
            self._close_parent()
        self._upload(at_most=1 if is_running else None)
        self._sent.events = None if is_running else size
        self._save()

    def _read_events(self) -> int:
        path = self._folder / "events.jsonl"
        size = path.stat().st_size if path.exists() else 0
        for event in self._reader.read():
            self._events.setdefault(event.node, NodeEvents()).add(event)
        return size

    def _find_runs(self) -> None:
        """Find MLflow runs that an interrupted call created and mlflow.json lacks; duplicates are deleted."""
        if self._is_sure:
            return
        if not self._sent.experiment:
            judged = sorted(map(short_name, self._graph.judged_by))
            swept = dict.fromkeys(name for combination in self._combinations for name in combination.values)
            changed = (text.partition("=")[0].strip() for text in self._record.state.overrides)
            columns = dict.fromkeys([*swept, *(_param(path) for path in changed if _param(path))])
            self._sent.experiment = self._tracker.experiment(self._record.state.experiment, judged, columns)
        self._found = self._tracker.runs_of(self._sent.experiment, self._record.run)
        known = {WHOLE: self._sent.parent}
        known |= {("node", name): sent.run_id for name, sent in self._sent.nodes.items()}
        known |= {("combination", name): sent.run_id for name, sent in self._sent.combinations.items()}
        for place, run_ids in self._found.items():
            kept = known.get(place) or run_ids[0]
            for run_id in run_ids:
                if run_id != kept:
                    self._tracker.delete_run(run_id)
            self._found[place] = [kept]
        self._is_sure = True

    def _made_run(self, place: Place, started: float, tags: Mapping[str, str]) -> str:
        """The existing or a new MLflow run of a node, of a combination, or of the whole run."""
        found = self._found.pop(place, None)
        if found:
            return found[0]
        self._is_sure = False  # until MLflow has answered
        run_id = self._tracker.create_run(self._sent.experiment, started, tags)
        self._is_sure = True
        return run_id

    def _send_parent(self) -> None:
        state, graph, sent = self._record.state, self._graph, self._sent
        if not sent.parent:
            note = {NOTE: shown_notes(graph)} if graph.notes else {}
            own = {
                **maker_tags(state, run_name(state)),
                "dflow.kind": "sweep" if self._combinations else "run",
                "dflow.pipeline": state.pipeline,
                "dflow.run": state.run,
                **({"dflow.set": "\n".join(state.overrides)} if state.overrides else {}),
            }
            sent.parent = self._made_run(WHOLE, state.started, {**graph.tags, **note, **own})
            sent.notes = ("", shown_notes(graph))
            self._save()
        if not sent.params_sent:
            shown = {"seed": str(graph.seed)}
            for node in graph.nodes.values():
                if node.copy is None:
                    shown |= {f"{node.id}.{name}": value for name, value in params(node, edges=False).items()}
            self._tracker.log_params(sent.parent, shown)
            sent.params_sent = True
            self._save()

    def _close_parent(self) -> None:
        record, graph, sent = self._record, self._graph, self._sent
        unswept = [graph.nodes[node_id] for node_id in graph.result_nodes if graph.nodes[node_id].copy is None]
        send_metrics(self._tracker, sent.parent, sent, record, graph, unswept)
        if self._combinations:
            send_best(self._tracker, sent.parent, record, graph, self._combinations)
        self._warning = send_report(self._tracker, self._report, record, sent) or self._warning
        note = run_note(record, graph, sent.experiment, sent.parent)
        send_note(self._tracker, sent.parent, sent, note, self._save)
        status = status_of(record.state.status)
        self._tracker.close(sent.parent, status, record.state.started + run_seconds(record))
        sent.parent_status = status

    def _send_node(self, node: GraphNode, state: NodeState) -> None:
        events = self._events.get(node.id) or NodeEvents()
        sent = self._sent.nodes.get(node.id)
        if sent is not None and any(count < sent.begun for count in events.retained[sent.retained :]):
            self._tracker.delete_run(sent.run_id)  # MLflow cannot delete single points
            self._found.pop(("node", node.id), None)
            del self._sent.nodes[node.id]
            self._save()
            sent = None
        sent = sent or self._made_child(node, state, len(events.retained))
        if not sent.complete:
            self._tracker.log_params(sent.run_id, params(node))
            self._tracker.log_inputs(sent.run_id, artifacts_read(self._store, self._record, node))
            sent.complete = True
        if state.cache != "hit":
            self._send_points(sent, events)
        status = "RUNNING" if self._is_live and state.state == "running" else status_of(state.state)
        if status != sent.status:
            if status == "RUNNING":
                self._tracker.run_again(sent.run_id)
            else:
                self._close_child(node, state, sent, status)
                self._send_model(node, state)
            sent.status = status
            self._save()
        elif sent.model == FAILED and not (self._is_live and self._record.state.status == "running"):
            self._send_model(node, state)
            self._judge_again(sent)
        if len(events.accepted) > sent.accepted:
            self._tracker.log_tags(sent.run_id, {"dflow.accepted": "\n".join(starmap(_accepted, events.accepted))})
            sent.accepted = len(events.accepted)
            self._save()

    def _send_model(self, node: GraphNode, state: NodeState) -> None:
        if state.digest is None or state.state != "done":
            return
        try:
            send_model(self._tracker, self._store, self._sent, self._graph, node, state.digest)
        except StageError as error:
            self._sent.nodes[node.id].model = FAILED
            self._warning = f"MLflow lacks the model of {node.id}: {error}; try it: dflow sync {self._folder.name}"

    def _upload(self, at_most: int | None) -> None:
        """Send the whole artifacts of the nodes that the pipeline names; at_most: files, as the rest of a live run must
        not wait long. What was sent is not sent again after a kill.
        """
        for node in self._graph.nodes.values():
            state, sent = self._record.state.nodes[node.id], self._sent.nodes.get(node.id)
            if not self._graph.is_uploaded(node) or sent is None or state.state != "done" or state.digest is None:
                continue
            if sent.upload is None or sent.upload.digest != state.digest:
                sent.upload = Upload(state.digest, is_complete=self._has_upload(state))
            if not sent.upload.is_complete:
                self._upload_artifact(node, sent, sent.upload, at_most)
                if at_most is not None:
                    return

    def _upload_artifact(self, node: GraphNode, sent: SentNode, upload: Upload, at_most: int | None) -> None:
        files = whole_artifact(self._record, node.id)
        wrong = [name for name, path in files.items() if not is_plain(path, self._store)]
        if wrong or not files:
            why = f"{wrong[0]} is missing, or a link: see `dflow verify`" if wrong else "the store no longer holds it"
            self._warning = f"MLflow lacks the artifact of {node.id}: {why}"
            return
        size = f"{counted(len(files), 'file')}, {shown_bytes(sum(path.stat().st_size for path in files.values()))}"
        if not upload.files:
            self._say(f"uploading the artifact of {node.id} to MLflow: {size}")
        rest = list(files.items())[upload.files :]
        for name, path in rest[:at_most]:
            self._tracker.log_files(sent.run_id, {name: path}, {})
            upload.files += 1
            self._save()
        if upload.files == len(files):
            self._tracker.log_tags(sent.run_id, {"dflow.uploaded": size})
            upload.is_complete = True
            self._save()

    def _has_upload(self, state: NodeState) -> bool:
        """Whether the run that computed a cached artifact has uploaded it, to the same place."""
        folder = self._store / "records" / (state.source_run or "")
        sent = SentRun.read(folder) if state.cache == "hit" and state.source_run else None
        maker = load_begun(folder) if sent is not None else None
        if sent is None or maker is None or maker.state.tracking_uri != self._record.state.tracking_uri:
            return False
        uploads = [node.upload for node in sent.nodes.values() if node.upload is not None]
        return any(upload.is_complete and upload.digest == state.digest for upload in uploads)

    def _judge_again(self, sent: SentNode) -> None:
        """Have the final metrics sent again, linked to the model that they evaluate."""
        if sent.model != FAILED:
            self._sent.parent_status = None
            for combination in self._sent.combinations.values():
                combination.status = None
            self._save()

    def _made_child(self, node: GraphNode, state: NodeState, retained: int) -> SentNode:
        own = next((each for each in self._combinations if node.id in each.own), None)
        parent = self._sent.parent if own is None else self._sent.combinations[own.name].run_id
        identity = {"mlflow.parentRunId": parent, "dflow.run": self._record.run, "dflow.node": node.id}
        state_of_run = self._record.state
        names = maker_tags(state_of_run, f"{node.id} ({run_name(state_of_run)})")
        names |= {"dflow.kind": "node", "dflow.op": node.op.name}
        tags = self._state_tags(state)
        existed = ("node", node.id) in self._found
        started = state.started or self._record.state.started
        run_id = self._made_run(("node", node.id), started, {**identity, **names, **tags})
        if not existed:
            self._tags[run_id] = tags
        begun = len(self._events[node.id].points) if existed and node.id in self._events else 0
        self._sent.nodes[node.id] = child = SentNode(run_id, begun=begun, retained=retained)
        return child

    def _send_points(self, sent: SentNode, events: NodeEvents) -> None:
        while sent.points < len(events.points):
            end = min(sent.points + POINTS_AT_ONCE, len(events.points))
            some_exist = sent.begun > sent.points
            sent.begun = max(sent.begun, end)
            sent.retained = len(events.retained)
            self._save()
            points = events.points[sent.points : end]
            self._tracker.log_points(sent.run_id, points, events.names, some_exist=some_exist)
            sent.points = end
            self._save()

    def _close_child(self, node: GraphNode, state: NodeState, sent: SentNode, status: str) -> None:
        tracker, run_id = self._tracker, sent.run_id
        tags = self._state_tags(state)
        if state.error:
            tags["dflow.error"] = for_run(state.error, self._record.run)[:ERROR_LENGTH]
            if state.failure is not None and state.failure.advice:
                tags["dflow.what_to_do"] = for_run(state.failure.advice, self._record.run)
            if not sent.failed:
                sent.failed = True
                self._save()
        elif sent.failed:
            for name in ("dflow.error", "dflow.what_to_do"):
                tracker.delete_tag(run_id, name)
            sent.failed = False
        if tags != self._tags.get(run_id):
            tracker.log_tags(run_id, tags)
            self._tags[run_id] = tags
        ended = state.ended or self._record.state.started
        if state.cache == "hit":
            tracker.log_results(run_id, [(ended, state.metrics)])
        figures = self._events.get(node.id, NodeEvents()).figures
        tracker.log_files(run_id, *node_files(self._record, node.id, figures))
        if state.digest is not None:
            read = list(files_read(self._store, node, state.digest))
            tracker.log_inputs(run_id, read)
            tracker.log_inputs(self._sent.parent, [each for each in read if each.path is not None])
        tracker.close(run_id, status, ended)

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
            sent = SentRun.read(folder) or SentRun()
            maker = load_begun(folder) if sent.nodes else None
            nodes = maker.state.nodes if maker is not None else {}
            self._makers[run] = {nodes[name].key: child.run_id for name, child in sent.nodes.items() if name in nodes}
        return self._makers[run]

    def _save(self) -> None:
        self._sent.write(self._folder)


def _param(path: str) -> str:
    """The parameter of the whole run that a value of `-s` is; empty where it is none."""
    owner, _, field = path.partition(".")
    if owner in TABLE_NAMES:
        return field if path == "pipeline.seed" else ""
    return path


def _accepted(at: float, event: Accepted) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    return f"{when} UTC, {event.user}: {event.reason} (key {shown_digest(event.key)})"
