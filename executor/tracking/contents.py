"""What MLflow is to hold of a run: a function of its record, which loads no mlflow.

The whole is one run, with a run for each of its nodes below it. In a sweep, each combination is a run below the whole
one, and the nodes of only that combination are runs below it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import starmap
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.artifact_digest import MANIFEST, OUTSIDE_DIGEST
from dsl.finding import for_run
from dsl.graph import Graph, GraphNode
from dsl.launch import TABLE_NAMES
from executor.records.events import Accepted, NodeEvents
from executor.records.run_record import NodeState, Record, load_begun
from executor.results.run_table import is_judged
from executor.results.sweep import Combination, combinations, differing_params, final_metrics, params, sorted_rows
from executor.store.artifact_store import Store
from executor.store.manifest import Manifest, own_files
from executor.system.output import shown_digest
from executor.tracking.run_description import combination_note, maker_tags, run_name, run_note, shown_notes
from executor.tracking.sync_state import SentRun
from ops.lib.logged_model import LoggedModel, Tensor

Place = tuple[str, str]  # "node" and its id, "combination" and its name
WHOLE: Place = ("run", "")
NOTE = "mlflow.note.content"
ARTIFACT = "artifact/"
ACCEPTED, UPLOADED, RESTARTS = "dflow.accepted", "dflow.uploaded", "dflow.restarts"
FAILURE = ("dflow.error", "dflow.what_to_do")  # tags of a node while it is failed
# MLflow's names for the states of runs and nodes; one recorded as running that no longer runs was killed.
STATUS = {"done": "FINISHED", "failed": "FAILED"}
ERROR_LENGTH = 1000
NAME_LENGTH = 250
FILE_LIMIT = 1 << 20  # larger files of an artifact are listed in references.json instead

Measured = tuple[float, Mapping[str, float]]  # when a node ended, and its final metrics


@frozen
class Dataset:
    """A data set that a node read. context: the edge or field that names it. path: None for several files."""

    context: str
    name: str
    digest: str
    path: str | None


@frozen
class Reference:
    """A file of an artifact that is too large for MLflow. size: bytes."""

    size: int
    sha256: str
    path: str


@frozen
class ModelFiles:
    """The files of a model. maker: the MLflow run that made the model. small: files by name; large: the others."""

    maker: str
    small: Mapping[str, Path]
    large: Mapping[str, Reference]


@frozen(kw_only=True)
class Ending:
    """The final contents of an MLflow run. results: by node. best: figures of a sweep's best combination.

    files: by their names in MLflow. references: of files too large to upload.
    """

    ended: float
    results: Mapping[str, Measured] = {}
    best: Sequence[Measured] = ()
    files: Mapping[str, Path] = {}
    references: Mapping[str, Reference] = {}
    reads: Sequence[Dataset] = ()
    note: str = ""


@frozen(kw_only=True)
class MlflowRun:
    """The contents of one MLflow run: that of the whole dflow run, of a combination, or of a node.

    below: the run that it is nested in. first_tags: set once, when it is created; the user may change them. tags: kept
    equal to the record. reads: artifacts that the node reads. ending: computes the final contents, from the ids of the
    experiment and of the whole run in MLflow.
    """

    place: Place
    below: Place | None
    started: float
    status: str
    first_tags: Mapping[str, str]
    tags: Mapping[str, str] = {}
    params: Callable[[], Mapping[str, str]]
    reads: Sequence[Dataset] = ()
    points: NodeEvents | None = None
    ending: Callable[[str, str], Ending]


class Contents:
    """Everything that MLflow should hold of a run, as far as the run's record has come."""

    def __init__(self, store: Path, graph: Graph) -> None:
        self.graph = graph
        self.combinations = combinations(graph)
        self._store = store
        self._makers: dict[str, dict[str | None, str]] = {}  # by run, the MLflow runs of its nodes, by key

    def runs(self, record: Record, events: Mapping[str, NodeEvents], *, is_live: bool) -> list[MlflowRun]:
        """The whole run, the combinations, and the nodes that have begun. is_live: the run may be in progress."""
        is_running = is_live and record.state.status == "running"
        swept = [self._combination(record, place, is_running=is_running) for place in range(len(self.combinations))]
        nodes = [
            self._node(record, node, events.get(node.id) or NodeEvents(), is_live=is_live)
            for node in self.graph.nodes.values()
            if record.state.nodes[node.id].state != "pending" or record.state.nodes[node.id].attempt
        ]
        return [self._whole(record, is_running=is_running), *swept, *nodes]

    def _whole(self, record: Record, *, is_running: bool) -> MlflowRun:
        state, graph = record.state, self.graph
        own = {
            **maker_tags(state, run_name(state)),
            "dflow.kind": "sweep" if self.combinations else "run",
            "dflow.pipeline": state.pipeline,
            "dflow.run": state.run,
            **({"dflow.set": "\n".join(state.overrides)} if state.overrides else {}),
        }
        note = {NOTE: shown_notes(graph)} if graph.notes else {}
        return MlflowRun(
            place=WHOLE,
            below=None,
            started=state.started,
            status="RUNNING" if is_running else _status(state.status),
            first_tags={**graph.tags, **note, **own},
            params=partial(whole_params, graph),
            ending=partial(self._end_of_whole, record),
        )

    def _end_of_whole(self, record: Record, experiment: str, parent: str) -> Ending:
        nodes = record.state.nodes
        read = [
            each
            for node in self.graph.nodes.values()
            if (digest := nodes[node.id].digest) is not None
            for each in files_read(self._store, node, digest)
        ]
        return Ending(
            ended=record.state.started + record.seconds(),
            results=results(record, self.graph, unswept(self.graph)),
            best=best_results(record, self.graph, self.combinations) if self.combinations else (),
            reads=[each for each in read if each.path is not None],
            note=run_note(record, self.graph, experiment, parent),
        )

    def _combination(self, record: Record, place: int, *, is_running: bool) -> MlflowRun:
        state, combination = record.state, self.combinations[place]
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
            params=lambda: {**self._differing[place], **combination.values},
            ending=partial(self._end_of_combination, record, combination),
        )

    @cached_property
    def _differing(self) -> list[dict[str, str]]:
        return differing_params(self.combinations)

    def _end_of_combination(self, record: Record, combination: Combination, experiment: str, parent: str) -> Ending:
        state = record.state
        ended = max((state.nodes[node.id].ended or 0.0 for node in combination.nodes), default=0.0)
        return Ending(
            ended=ended or state.started,
            results=results(record, self.graph, combination.nodes),
            note=combination_note(combination, state, self.graph, experiment, parent),
        )

    def _node(self, record: Record, node: GraphNode, events: NodeEvents, *, is_live: bool) -> MlflowRun:
        of_run, state = record.state, record.state.nodes[node.id]
        own = next((each for each in self.combinations if node.id in each.own), None)
        first_tags = {
            "dflow.run": record.run,
            "dflow.node": node.id,
            **maker_tags(of_run, f"{node.id} ({run_name(of_run)})"),
            "dflow.kind": "node",
            "dflow.op": node.op.name,
        }
        if events.restarts:
            first_tags[RESTARTS] = str(events.restarts)
        is_running = is_live and state.state == "running"
        return MlflowRun(
            place=("node", node.id),
            below=WHOLE if own is None else ("combination", own.name),
            started=events.began or state.started or of_run.started,
            status="RUNNING" if is_running else _status(state.state),
            first_tags=first_tags,
            tags=self._tags(record, state, events, is_running=is_running),
            params=partial(params, node),
            reads=list(artifacts_read(self._store, record, node)),
            points=None if state.cache == "hit" else events,
            ending=lambda experiment, parent: self._end_of_node(record, node, events),
        )

    def _tags(self, record: Record, state: NodeState, events: NodeEvents, *, is_running: bool) -> dict[str, str]:
        tags = {"dflow.key": state.key or "", "dflow.cache": state.cache or "", "dflow.digest": state.digest or ""}
        if state.attempt > 1:
            tags["dflow.attempts"] = str(state.attempt)
        if state.acceptance not in ("", "computed"):
            tags["dflow.acceptance"] = state.acceptance
        if state.source_run:
            tags["dflow.source_run"] = state.source_run
            maker = self.maker(state)
            if maker is not None:
                tags["dflow.source_mlflow_run"] = maker
        if state.failure is not None and not is_running:
            told = (state.failure.what[:ERROR_LENGTH], state.failure.advice)
            tags |= {name: for_run(text, record.run) for name, text in zip(FAILURE, told, strict=True) if text}
        if events.accepted:
            tags[ACCEPTED] = "\n".join(starmap(_accepted_text, events.accepted))
        return tags

    def _end_of_node(self, record: Record, node: GraphNode, events: NodeEvents) -> Ending:
        state = record.state.nodes[node.id]
        ended = state.ended or record.state.started
        if state.seconds is not None and events.began is not None and state.cache != "hit":
            ended = events.began + state.seconds  # without the time between attempts, as in every table
        files, references = node_files(record, node.id, events.figures)
        return Ending(
            ended=ended,
            results={node.id: (ended, state.metrics)} if state.cache == "hit" else {},
            files=files,
            references=references,
            reads=[] if state.digest is None else list(files_read(self._store, node, state.digest)),
        )

    def maker(self, state: NodeState) -> str | None:
        """The MLflow run of the node that computed a cached artifact in another run; None if unknown."""
        run = state.source_run
        if run is None:
            return None
        if run not in self._makers:
            folder = self._store / "records" / run
            sent = SentRun.read(folder) or SentRun()
            record = load_begun(folder) if sent.nodes else None
            nodes = record.state.nodes if record is not None else {}
            self._makers[run] = {nodes[name].key: child.run_id for name, child in sent.nodes.items() if name in nodes}
        return self._makers[run].get(state.key)


def _status(state: str) -> str:
    return STATUS.get(state, "KILLED")


def whole_params(graph: Graph) -> dict[str, str]:
    """The parameters of all nodes that are no copies, as node.field."""
    shown = {"seed": str(graph.seed)}
    for node in graph.nodes.values():
        if node.copy is None:
            shown |= {f"{node.id}.{name}": value for name, value in params(node, edges=False).items()}
    return shown


def _combination_status(combination: Combination, record: Record, *, is_running: bool) -> str:
    nodes = [record.state.nodes[node.id] for node in combination.nodes]
    states = [node.state for node in nodes]
    if all(state == "done" for state in states):
        return "FINISHED"
    if is_running:
        return "RUNNING"
    return "FAILED" if "failed" in states or any(state.is_blocked for state in nodes) else "KILLED"


def _accepted_text(at: float, event: Accepted) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    return f"{when} UTC, {event.user}: {event.reason} (key {shown_digest(event.key)})"


def columns(record: Record, graph: Graph, found: Iterable[Combination]) -> tuple[list[str], list[str]]:
    """The metrics and parameters by which an experiment's runs are compared.

    They are the metrics that judge the result, the fields of a sweep, and the values that `-s` changed.
    """
    swept = dict.fromkeys(name for combination in found for name in combination.values)
    changed = (_param(text.partition("=")[0].strip()) for text in record.state.overrides)
    return sorted(map(_short_name, graph.judged_by)), list(dict.fromkeys([*swept, *filter(None, changed)]))


def _param(path: str) -> str:
    """The name of the whole run's parameter that a value of `-s` sets; "" if it is none."""
    owner, _, field = path.partition(".")
    if owner in TABLE_NAMES:
        return field if path == "pipeline.seed" else ""
    return path


def results(record: Record, graph: Graph, nodes: Iterable[GraphNode]) -> dict[str, Measured]:
    """The final metrics of each node, and when it ended.

    Main metrics come first, since MLflow's charts start with the first metric. A metric that judges the result also
    gets a short name, such as `tau`, so that all runs share a column.
    """
    states = record.state.nodes
    found = final_metrics(nodes, states)
    short = _short(found, graph)
    main = {*short, *(name for name in found if is_judged(name, graph.judged_by))}
    by_node: dict[str, dict[str, float]] = {}
    for name, (node_id, value) in sorted({**short, **found}.items(), key=lambda each: each[0] not in main):
        by_node.setdefault(node_id, {})[name] = value
    return {node_id: (states[node_id].ended or record.state.started, values) for node_id, values in by_node.items()}


def best_results(record: Record, graph: Graph, found: Sequence[Combination]) -> list[Measured]:
    """The judging metrics of the best combination of a sweep, by short names such as `tau`.

    Left out where a node that was not swept has such a metric.
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
    """The judging metrics by short name, such as `tau` for `eval/tau`, from the first node that has one."""
    return {
        _short_name(judged): next(value for name, value in found.items() if is_judged(name, (judged,)))
        for judged in sorted(graph.judged_by)
        if any(is_judged(name, (judged,)) for name in found)
    }


def judgement(graph: Graph, judged: Iterable[Measured]) -> dict[str, str]:
    """The metrics that ops declare in `judged_by`, such as tau, as text by name.

    Where several nodes have one, the first also gets the plain name, so that models can be compared by it.
    """
    names = graph.judged_by
    found = {name: value for _, values in judged for name, value in values.items() if is_judged(name, names)}
    first = {each: next((found[name] for name in found if is_judged(name, (each,))), None) for each in sorted(names)}
    known = {**{name: value for name, value in first.items() if value is not None}, **found}
    return {name: f"{value:.4g}" for name, value in known.items()}


def artifacts_read(store: Path, record: Record, node: GraphNode) -> Iterable[Dataset]:
    for edge, producers in node.inputs.items():
        for producer in producers:
            digest = record.state.nodes[producer].digest or ""
            yield Dataset(edge, producer, digest, str(store / "objects" / digest))


def files_read(store: Path, node: GraphNode, digest: str) -> Iterable[Dataset]:
    """The files and folders that a node's config names, with the digests recorded in the artifact's manifest."""
    manifest = Manifest.of(store / "objects" / digest)
    for field, content in ({} if manifest is None else manifest.key_parts.external).items():
        path = getattr(node.config, field) if field in node.op.fields else None
        yield Dataset(field, Path(path).name if path else f"{node.id}.{field}", content, path)


def node_files(record: Record, node_id: str, figures: Iterable[str]) -> tuple[dict[str, Path], dict[str, Reference]]:
    """The files to upload for a node, by their names in MLflow, and references.json for large ones.

    A cached node uploads only its manifest. figures: their names; the files lie in the record.
    """
    state, records = record.state.nodes[node_id], record.folder.parent
    paths = [record.figures_path(node_id) / f"{name}.png" for name in figures]
    files = {f"figures/{path.name}": path for path in paths}
    references: dict[str, Reference] = {}
    is_hit = state.cache == "hit"
    if not is_hit:
        log = record.log_path(node_id)
        files[log.name] = log
    if state.digest is not None:
        folder = records.parent / "objects" / state.digest
        maker = state.source_run if is_hit else record.run
        own = own_files(records, maker, Store(records.parent).computed_key(maker, state.key), folder)
        files |= {MANIFEST: own[MANIFEST]} if MANIFEST in own else {}
        if not is_hit:
            small, references = artifact_files(folder, own)
            files |= small
    return files, references


def artifact_files(folder: Path, own: Mapping[str, Path]) -> tuple[dict[str, Path], dict[str, Reference]]:
    """The small files of an artifact by their names in MLflow, and the others.

    own: the files outside its digest to include, see store/manifest.py.
    """
    manifest = Manifest.read(own.get(MANIFEST, folder / MANIFEST))
    files = {} if manifest is None else manifest.files
    paths = {name: own.get(name, folder / name) for name in files if name in own or name not in OUTSIDE_DIGEST}
    large = {
        name: Reference(files[name].size, files[name].sha256, str(path))
        for name, path in paths.items()
        if files[name].size > FILE_LIMIT
    }
    return {f"artifact/{name}": path for name, path in paths.items() if name not in large}, large


def whole_artifact(record: Record, node_id: str) -> dict[str, Path]:
    """All files of an artifact by their names in MLflow, in order; empty where the store no longer holds it."""
    state, records = record.state.nodes[node_id], record.folder.parent
    assert state.digest is not None
    folder = records.parent / "objects" / state.digest
    maker = state.source_run if state.cache == "hit" else record.run
    own = own_files(records, maker, Store(records.parent).computed_key(maker, state.key), folder)
    small, large = artifact_files(folder, own)
    return dict(sorted({**small, **{f"artifact/{name}": Path(file.path) for name, file in large.items()}}.items()))


def model_name(name: str) -> str:
    """The name without characters that MLflow forbids in names of models."""
    return re.sub(r"[/:.%\"']", "_", name)[:NAME_LENGTH]


def mlmodel(model_id: str, model: LoggedModel) -> dict[str, Any]:
    """The content of the file MLmodel, by which MLflow knows a model: its signature, and the format of its weights.

    JSON of it is YAML, as MLflow reads it. Source: https://mlflow.org/docs/latest/ml/model, tensor-based signatures.
    """
    signature = {"inputs": _columns(model.inputs), "outputs": _columns(model.outputs), "params": None}
    return {"model_id": model_id, "flavors": {"safetensors": {"data": "."}}, "signature": signature}


def _columns(tensors: Sequence[Tensor]) -> str:
    shown = [
        {"name": each.name, "type": "tensor", "tensor-spec": {"dtype": each.dtype, "shape": list(each.shape)}}
        for each in tensors
    ]
    return json.dumps(shown)
