"""Brings MLflow to hold a run: one run for the whole, one for each of its nodes.

In a sweep, each combination is a run below the whole one, and the nodes of only that combination are runs below it.

What MLflow is to hold is a function of the record, and each of its runs is replayed: MLflow's runs are found by their
tags, they say what they have, and what is sent again changes nothing (a point that a folder of files has already is
there twice). A run is closed when all of it was sent. So a call may fail, or be killed, at any place, and the next one
sends what is missing: while the run is in progress, after a resume, or by `dflow sync` once a server is back.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import starmap
from pathlib import Path

from attrs import frozen

from dsl.errors import NotTrusted, StageError, StoreError
from dsl.finding import for_run
from dsl.graph import Graph, GraphNode
from dsl.hooks import hook
from dsl.secrets import redact, secret_names, values_of
from dsl.sizes import shown_bytes
from dsl.tables import TABLE_NAMES
from executor.records.duration import run_seconds
from executor.records.events import Accepted, EventReader
from executor.records.metric_points import NodeEvents
from executor.records.run_record import NodeState, Record, load_begun
from executor.results.metric_order import is_judged
from executor.results.node_params import params
from executor.results.sweep import Combination, combinations, differing_params, final_metrics, sorted_rows
from executor.system.garbage import no_collection
from executor.system.output import counted, shown_digest
from executor.system.symlinks import is_plain
from executor.system.trust import HOW, require_own_store
from executor.tracking.logged_model_process import described
from executor.tracking.mlflow_client import (
    NOTE,
    UNREACHABLE,
    WHOLE,
    HeldRun,
    Place,
    Tracker,
    is_transient,
    shown_error,
    tracking_uri,
)
from executor.tracking.node_files import (
    ModelFiles,
    artifact_files,
    artifacts_read,
    files_read,
    node_files,
    whole_artifact,
)
from executor.tracking.report_writer import ReportWriter
from executor.tracking.run_description import combination_note, maker_tags, run_name, run_note, shown_notes
from executor.tracking.sync_state import SentPart, SentRun, log_size, status_of

POINTS_AT_ONCE = 2000
ERROR_LENGTH = 1000
LOCKED_TRIES = 15
ARTIFACT = "artifact/"
ACCEPTED, UPLOADED, RESTARTS = "dflow.accepted", "dflow.uploaded", "dflow.restarts"
FAILURE = ("dflow.error", "dflow.what_to_do")  # tags of a node while it is failed


@frozen(kw_only=True)
class MlflowRun:
    """What MLflow is to hold of the whole run, a combination or a node, besides its points and files.

    below: the run that it lies below. first_tags: those with which it is made; the user may change them. tags: those
    that follow the record.
    """

    place: Place
    below: Place | None
    started: float
    status: str
    first_tags: Mapping[str, str]
    tags: Mapping[str, str] = {}


def whole_run(record: Record, graph: Graph, *, is_sweep: bool, is_running: bool) -> MlflowRun:
    state = record.state
    own = {
        **maker_tags(state, run_name(state)),
        "dflow.kind": "sweep" if is_sweep else "run",
        "dflow.pipeline": state.pipeline,
        "dflow.run": state.run,
        **({"dflow.set": "\n".join(state.overrides)} if state.overrides else {}),
    }
    note = {NOTE: shown_notes(graph)} if graph.notes else {}
    status = "RUNNING" if is_running else status_of(state.status)
    return MlflowRun(
        place=WHOLE, below=None, started=state.started, status=status, first_tags={**graph.tags, **note, **own}
    )


def whole_params(graph: Graph) -> dict[str, str]:
    """The parameters of all nodes that are no copies, as node.field."""
    shown = {"seed": str(graph.seed)}
    for node in graph.nodes.values():
        if node.copy is None:
            shown |= {f"{node.id}.{name}": value for name, value in params(node, edges=False).items()}
    return shown


def combination_run(record: Record, combination: Combination, *, is_running: bool) -> MlflowRun:
    state = record.state
    return MlflowRun(
        place=("combination", combination.name),
        below=WHOLE,
        started=state.started,
        status=_combination_status(combination, record, is_running=is_running),
        first_tags={
            **maker_tags(state, f"{combination.name} ({run_name(state)})"),
            "dflow.kind": "combination",
            "dflow.pipeline": state.pipeline,
            "dflow.run": state.run,
            "dflow.combination": combination.name,
        },
    )


def _combination_status(combination: Combination, record: Record, *, is_running: bool) -> str:
    nodes = [record.state.nodes[node.id] for node in combination.nodes]
    states = [node.state for node in nodes]
    if all(state == "done" for state in states):
        return "FINISHED"
    if is_running:
        return "RUNNING"
    return "FAILED" if "failed" in states or any(state.is_blocked for state in nodes) else "KILLED"


def node_run(
    record: Record,
    node: GraphNode,
    events: NodeEvents,
    *,
    combination: Combination | None,
    maker: str | None,
    is_live: bool,
) -> MlflowRun:
    """combination: the only one that it belongs to. maker: the MLflow run in which a cached artifact was computed."""
    of_run, state = record.state, record.state.nodes[node.id]
    first_tags = {
        "dflow.run": record.run,
        "dflow.node": node.id,
        **maker_tags(of_run, f"{node.id} ({run_name(of_run)})"),
        "dflow.kind": "node",
        "dflow.op": node.op.name,
    }
    if events.restarts:
        first_tags[RESTARTS] = str(events.restarts)
    tags = {"dflow.key": state.key or "", "dflow.cache": state.cache or "", "dflow.digest": state.digest or ""}
    if state.attempt > 1:
        tags["dflow.attempts"] = str(state.attempt)
    if state.acceptance not in ("", "computed"):
        tags["dflow.acceptance"] = state.acceptance
    if state.source_run:
        tags["dflow.source_run"] = state.source_run
    if maker is not None:
        tags["dflow.source_mlflow_run"] = maker
    is_running = is_live and state.state == "running"
    if state.failure is not None and not is_running:
        told = (state.failure.what[:ERROR_LENGTH], state.failure.advice)
        tags |= {name: for_run(text, record.run) for name, text in zip(FAILURE, told, strict=True) if text}
    if events.accepted:
        tags[ACCEPTED] = "\n".join(starmap(_accepted_text, events.accepted))
    return MlflowRun(
        place=("node", node.id),
        below=WHOLE if combination is None else ("combination", combination.name),
        started=state.started or of_run.started,
        status="RUNNING" if is_running else status_of(state.state),
        first_tags=first_tags,
        tags=tags,
    )


def _accepted_text(at: float, event: Accepted) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    return f"{when} UTC, {event.user}: {event.reason} (key {shown_digest(event.key)})"


def columns(record: Record, graph: Graph, found: Iterable[Combination]) -> tuple[list[str], list[str]]:
    """The metrics and parameters by which runs of the experiment are compared: what judges the result, the fields of a
    sweep, and the values that `-s` changed.
    """
    swept = dict.fromkeys(name for combination in found for name in combination.values)
    changed = (_param(text.partition("=")[0].strip()) for text in record.state.overrides)
    return sorted(map(_short_name, graph.judged_by)), list(dict.fromkeys([*swept, *filter(None, changed)]))


def _param(path: str) -> str:
    """The parameter of the whole run that a value of `-s` is; empty where it is none."""
    owner, _, field = path.partition(".")
    if owner in TABLE_NAMES:
        return field if path == "pipeline.seed" else ""
    return path


Results = list[tuple[float, dict[str, float]]]  # (when its node ended, values)


def results(record: Record, graph: Graph, nodes: Iterable[GraphNode]) -> dict[str, tuple[float, dict[str, float]]]:
    """By node, when it ended and its final metrics.

    Main metrics come first: MLflow's charts start with the first metric. What judges the result also has a short name,
    `tau`, under which it is one column of all runs, whatever their nodes.
    """
    states = record.state.nodes
    found = final_metrics(nodes, states)
    short = _short(found, graph)
    main = {*short, *(name for name in found if is_judged(name, graph.judged_by))}
    by_node: dict[str, tuple[float, dict[str, float]]] = {}
    for name, (node_id, value) in sorted({**short, **found}.items(), key=lambda each: each[0] not in main):
        ended = states[node_id].ended or record.state.started
        by_node.setdefault(node_id, (ended, {}))[1][name] = value
    return by_node


def best_results(record: Record, graph: Graph, found: Sequence[Combination]) -> Results:
    """What judges the first combination of a sweep's table, by its short name: `tau`.

    Not where a node that was not swept has one.
    """
    states = record.state.nodes
    shared = _short(final_metrics(unswept(graph), states), graph)
    rows, sort_by = sorted_rows(graph, states, found)
    if sort_by not in rows[0].metrics:
        return []
    best = _short(final_metrics(rows[0].combination.result_nodes(graph), states), graph)
    return [
        (states[node_id].ended or record.state.started, {name: value})
        for name, (node_id, value) in best.items()
        if name not in shared
    ]


def unswept(graph: Graph) -> list[GraphNode]:
    """The result nodes that no sweep copied."""
    return [graph.nodes[node_id] for node_id in graph.result_nodes if graph.nodes[node_id].copy is None]


def _short_name(judged: str) -> str:
    return judged.rpartition("/")[2]


def _short(found: Mapping[str, tuple[str, float]], graph: Graph) -> dict[str, tuple[str, float]]:
    """By `tau` what `eval/tau` judges by: of the first node that has it."""
    return {
        _short_name(judged): next(value for name, value in found.items() if is_judged(name, (judged,)))
        for judged in sorted(graph.judged_by)
        if any(is_judged(name, (judged,)) for name in found)
    }


def judgement(graph: Graph, judged: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, str]:
    """The figures that ops declare in `judged_by`, such as tau.

    Where several nodes have one, the first also gets the plain name, so that models can be compared by it.
    """
    names = graph.judged_by
    found = {name: value for _, values in judged for name, value in values.items() if is_judged(name, names)}
    first = {each: next((found[name] for name in found if is_judged(name, (each,))), None) for each in sorted(names)}
    known = {**{name: value for name, value in first.items() if value is not None}, **found}
    return {name: f"{value:.4g}" for name, value in known.items()}


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
        self._warning: str | None = None
        self._held: dict[Place, HeldRun] | None = None  # None: MLflow has to be asked
        self._sent_points: Counter[str] = Counter()  # by node
        self._is_described: set[Place] = set()  # parameters and inputs were sent
        self._models: dict[str, str | None] = {}  # by node; None where it failed
        self._uploaded: dict[str, set[str]] = {}  # the files of a node's artifact that MLflow has
        self._is_elsewhere: dict[str, bool] = {}  # whether another run uploaded a node's artifact
        self._makers: dict[str, dict[str | None, str]] = {}
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
        except NotTrusted as error:
            why = str(error).removesuffix(f"; {HOW}")
            how = f"read it, then send it with `dflow sync {self._folder.name} --trust`"
            return f"MLflow lacks a part of the run: {why}; {how}"
        except UNREACHABLE as error:
            self._held = None
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
                self._held = None
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
        record, graph, tracker = self._record, self._graph, self._tracker
        is_running = self._is_live and record.state.status == "running"
        size = log_size(self._folder)
        for event in self._reader.read():
            self._events.setdefault(event.node, NodeEvents()).add(event)
        was_sent = self._sent.events == size
        self._find_runs()
        whole = whole_run(record, graph, is_sweep=bool(self._combinations), is_running=is_running)
        self._begin(whole, lambda: whole_params(graph))
        if is_running:
            tracker.run_again(self._held_of(whole))
        swept = [combination_run(record, each, is_running=is_running) for each in self._combinations]
        for number, run in enumerate(swept):
            self._begin(run, partial(self._combination_params.__getitem__, number))
        for node in graph.nodes.values():
            state = record.state.nodes[node.id]
            if state.state != "pending" or state.attempt:
                self._send_node(node, state)
        if not is_running:
            self._models = {node: model for node, model in self._models.items() if model is not None}  # tried again
        for combination, run in zip(self._combinations, swept, strict=True):
            if run.status != self._held_of(run).status or not (is_running or was_sent):
                self._end_combination(combination, run)
        if not (is_running or was_sent):
            self._end_whole(whole)
        self._upload(at_most=1 if is_running else None)
        self._sent.events = None if is_running or self._warning else size
        self._save()

    @cached_property
    def _combination_params(self) -> list[dict[str, str]]:
        """The swept values, and all parameters that differ between combinations."""
        differing = differing_params(self._combinations)
        return [{**more, **each.values} for each, more in zip(self._combinations, differing, strict=True)]

    # MLflow's runs.

    def _find_runs(self) -> None:
        """Ask MLflow which runs it has; of several for one place, which an unconfirmed call may leave, one is kept."""
        if self._held is not None:
            return
        if not self._sent.experiment:
            shown = columns(self._record, self._graph, self._combinations)
            self._sent.experiment = self._tracker.experiment(self._record.state.experiment, *shown)
        known = {self._sent.parent, *(part.run_id for part in self._sent.nodes.values())}
        known |= {part.run_id for part in self._sent.combinations.values()}
        held = {}
        for place, runs in self._tracker.runs_of(self._sent.experiment, self._record.run).items():
            held[place] = next((run for run in runs if run.run_id in known), runs[0])
            for run in runs:
                if run is not held[place]:
                    self._tracker.delete_run(run.run_id)
        self._held = held
        self._is_described.clear()
        self._sent_points.clear()

    def _held_of(self, run: MlflowRun) -> HeldRun:
        """The existing or a new run in MLflow, which mlflow.json names from then on."""
        assert self._held is not None
        if run.place not in self._held:
            above = {} if run.below is None else {"mlflow.parentRunId": self._held[run.below].run_id}
            tags = {**above, **run.first_tags, **run.tags}
            self._held[run.place] = self._tracker.create_run(self._sent.experiment, run.started, tags)
        run_id = self._held[run.place].run_id
        kind, name = run.place
        parts = self._sent.nodes if kind == "node" else self._sent.combinations
        if run.place == WHOLE:
            if run_id != self._sent.parent:
                self._sent.parent, self._sent.notes = run_id, ("", shown_notes(self._graph))
                self._save()
        elif name not in parts or parts[name].run_id != run_id:
            parts[name] = SentPart(run_id)
            self._save()
        return self._held[run.place]

    def _begin(self, run: MlflowRun, shown: Callable[[], Mapping[str, str]]) -> HeldRun:
        """The run in MLflow, with its parameters."""
        held = self._held_of(run)
        if run.place not in self._is_described:
            self._tracker.log_params(held, shown())
            self._is_described.add(run.place)
        return held

    def _save(self) -> None:
        self._sent.write(self._folder)

    # Nodes.

    def _send_node(self, node: GraphNode, state: NodeState) -> None:
        assert self._held is not None
        tracker = self._tracker
        events = self._events.get(node.id) or NodeEvents()
        own = next((each for each in self._combinations if node.id in each.own), None)
        maker = self._children_of(state.source_run).get(state.key) if state.source_run else None
        run = node_run(self._record, node, events, combination=own, maker=maker, is_live=self._is_live)
        before = self._held.get(run.place)
        if before is not None and before.tags.get(RESTARTS) != run.first_tags.get(RESTARTS):
            tracker.delete_run(before.run_id)  # MLflow cannot delete single points
            self._forget(run.place)
        held = self._held_of(run)
        changed = {name for name, value in run.tags.items() if held.tags.get(name) != value} - {ACCEPTED}
        outdated = [name for name in FAILURE if name in held.tags and name not in run.tags]
        if run.status == "RUNNING":
            tracker.run_again(held)
            self._describe(node, run, held)
            self._send_points(node, state, held, events)
        elif run.status != held.status or changed or outdated:
            self._describe(node, run, held)
            self._send_points(node, state, held, events)
            self._end_node(node, state, held, events)
            tracker.log_tags(held, run.tags)
            for name in outdated:
                tracker.delete_tag(held, name)
            tracker.close(held, run.status, state.ended or self._record.state.started)
        tracker.log_tags(held, run.tags)

    def _forget(self, place: Place) -> None:
        assert self._held is not None
        del self._held[place]
        self._is_described.discard(place)
        self._sent_points.pop(place[1], None)

    def _describe(self, node: GraphNode, run: MlflowRun, held: HeldRun) -> None:
        if run.place not in self._is_described:
            if not held.params:  # inputs come first, so that they are there where any parameter is
                self._tracker.log_inputs(held.run_id, artifacts_read(self._store, self._record, node))
            self._begin(run, lambda: params(node))

    def _send_points(self, node: GraphNode, state: NodeState, held: HeldRun, events: NodeEvents) -> None:
        while state.cache != "hit" and self._sent_points[node.id] < len(events.points):
            start = self._sent_points[node.id]
            points = events.points[start : start + POINTS_AT_ONCE]
            self._tracker.log_points(held.run_id, points, events.names)
            self._sent_points[node.id] += len(points)

    def _end_node(self, node: GraphNode, state: NodeState, held: HeldRun, events: NodeEvents) -> None:
        """Send what a node has in the end, besides its points."""
        tracker = self._tracker
        if held.tags.get("dflow.digest") != state.digest:
            tracker.delete_tag(held, UPLOADED)
        if state.cache == "hit":
            tracker.log_results(held.run_id, [(state.ended or self._record.state.started, state.metrics)])
        tracker.log_files(held, *node_files(self._record, node.id, events.figures))
        if state.digest is not None:
            read = list(files_read(self._store, node, state.digest))
            tracker.log_inputs(held.run_id, read)
            tracker.log_inputs(self._sent.parent, [each for each in read if each.path is not None])
        self._models.pop(node.id, None)
        self._model(node)

    def _model(self, node: GraphNode) -> str | None:
        """The id of the logged model that a node's artifact is; None where it is none, or could not be made."""
        state = self._record.state.nodes[node.id]
        if state.state != "done" or state.digest is None or hook(node.op, "logged_model") is None:
            return None
        if node.id not in self._models:
            try:
                self._models[node.id] = self._made_model(node, state.digest)
            except StageError as error:
                self._models[node.id] = None
                self._warning = f"MLflow lacks the model of {node.id}: {error}; try it: dflow sync {self._folder.name}"
        return self._models[node.id]

    def _made_model(self, node: GraphNode, digest: str) -> str | None:
        """Raises StageError where the op does not describe it."""
        tracker, folder, child = self._tracker, self._store / "objects" / digest, self._sent.nodes[node.id].run_id
        model_id = tracker.ready_model(self._sent.experiment, digest)
        if model_id is None:
            if not folder.is_dir():
                return None
            model = described(self._graph, node, folder)
            small, large = artifact_files(folder, {})  # a model is one for all runs, whatever they measured
            files = ModelFiles(child, {name.removeprefix(ARTIFACT): path for name, path in small.items()}, large)
            model_id = tracker.logged_model(self._sent.experiment, node.id, digest, model, files)
        tracker.log_output(child, model_id)
        return model_id

    def _children_of(self, run: str) -> dict[str | None, str]:
        """The MLflow runs of another run's nodes, by key."""
        if run not in self._makers:
            folder = self._store / "records" / run
            sent = SentRun.read(folder) or SentRun()
            maker = load_begun(folder) if sent.nodes else None
            nodes = maker.state.nodes if maker is not None else {}
            self._makers[run] = {nodes[name].key: child.run_id for name, child in sent.nodes.items() if name in nodes}
        return self._makers[run]

    # The whole run, and the combinations of a sweep, when they have ended. All of it can be sent again.

    def _end_combination(self, combination: Combination, run: MlflowRun) -> None:
        """Reopened after a resume."""
        record, sent, held = self._record, self._sent, self._held_of(run)
        if run.status == "RUNNING":
            self._tracker.run_again(held)
            return
        self._send_results(held, results(record, self._graph, combination.nodes))
        note = combination_note(combination, record.state, self._graph, sent.experiment, sent.parent)
        self._send_note(held, sent.combinations[combination.name], note)
        ended = max((record.state.nodes[node.id].ended or 0.0 for node in combination.nodes), default=0.0)
        self._tracker.close(held, run.status, ended or record.state.started)

    def _end_whole(self, run: MlflowRun) -> None:
        record, graph, sent, held = self._record, self._graph, self._sent, self._held_of(run)
        self._send_results(held, results(record, graph, unswept(graph)))
        if self._combinations:
            self._tracker.log_results(held.run_id, best_results(record, graph, self._combinations))
        written = self._report.written()
        if written.code == 0:
            self._tracker.log_files(held, {self._report.file.name: self._report.file}, {})
        else:
            reason = f"the report of the run could not be written ({written.reason})"
            self._warning = f"{reason}; try it: dflow report {record.run}"
        self._send_note(held, sent, run_note(record, graph, sent.experiment, sent.parent))
        self._tracker.close(held, run.status, record.state.started + run_seconds(record))

    def _send_results(self, held: HeldRun, found: Mapping[str, tuple[float, Mapping[str, float]]]) -> None:
        """Final metrics, also linked to each model that they evaluate: those of nodes downstream of it."""
        graph, tracker = self._graph, self._tracker
        for node in graph.nodes.values():
            judged = [each for node_id, each in found.items() if node_id in graph.below(node.id)]
            model_id = self._model(node) if judged else None
            if model_id is not None:
                tracker.log_results(held.run_id, judged, model_id)
                tracker.tag_model(model_id, judgement(graph, judged))
                tracker.log_output(held.run_id, model_id)
        tracker.log_results(held.run_id, found.values())

    def _send_note(self, held: HeldRun, sent: SentRun | SentPart, note: str) -> None:
        """Set the description of a run."""
        sent.notes = (*sent.notes[-1:], note)
        self._save()
        self._tracker.log_note(held, note, sent.notes)

    # Whole artifacts.

    def _upload(self, at_most: int | None) -> None:
        """Send the whole artifacts of the nodes that the pipeline names; at_most: files, as the rest of a live run must
        not wait long. A file that MLflow has is not sent again.
        """
        assert self._held is not None
        for node in self._graph.nodes.values():
            state, held = self._record.state.nodes[node.id], self._held.get(("node", node.id))
            if not self._graph.is_uploaded(node) or held is None or state.state != "done" or UPLOADED in held.tags:
                continue
            if node.id not in self._is_elsewhere:
                self._is_elsewhere[node.id] = self._is_uploaded_by_maker(state)
            if not self._is_elsewhere[node.id]:
                self._upload_artifact(node, held, at_most)
                if at_most is not None:
                    return

    def _upload_artifact(self, node: GraphNode, held: HeldRun, at_most: int | None) -> None:
        files = whole_artifact(self._record, node.id)
        wrong = [name for name, path in files.items() if not is_plain(path, self._store)]
        if wrong or not files:
            why = (
                f"{wrong[0]} is missing, or a link: see `dflow doctor --verify`"
                if wrong
                else "the store no longer holds it"
            )
            self._warning = f"MLflow lacks the artifact of {node.id}: {why}"
            return
        size = f"{counted(len(files), 'file')}, {shown_bytes(sum(path.stat().st_size for path in files.values()))}"
        if node.id not in self._uploaded:
            there = self._tracker.files_of(held, ARTIFACT.rstrip("/"))
            self._uploaded[node.id] = {name for name, path in files.items() if there.get(name) == path.stat().st_size}
            self._say(f"uploading the artifact of {node.id} to MLflow: {size}")
        rest = [name for name in files if name not in self._uploaded[node.id]]
        for name in rest[:at_most]:
            self._tracker.log_files(held, {name: files[name]}, {})
            self._uploaded[node.id].add(name)
        if len(self._uploaded[node.id]) == len(files):
            self._tracker.log_tags(held, {UPLOADED: size})

    def _is_uploaded_by_maker(self, state: NodeState) -> bool:
        """Whether the run that computed a cached artifact has uploaded it, to the same place."""
        run = state.source_run if state.cache == "hit" else None
        maker = load_begun(self._store / "records" / run) if run is not None else None
        if maker is None or maker.state.tracking_uri != self._record.state.tracking_uri:
            return False
        child = self._children_of(maker.run).get(state.key)
        return child is not None and bool(self._tracker.tag_of(child, UPLOADED))
