"""The record of a run: its plan, its state, and everything that the stages reported.

<store>/records/<run id>/graph.json     the compiled graph
                         plan.json      per node: decision, reason and key parts
                         events.jsonl   the log: all that happened, append-only, see events.py; the state is its fold
                         mlflow.json    what was sent to MLflow, see tracking/sync_state.py
                         mlflow.lock    flock by the process that sends it
                         <node>.log     stdout and stderr of the node's stages
                         figures/<node>/<name>.png
                         outside_digest/<key>/<file>    as this run wrote them, see store/manifest.py
                         tags.json      names that the user gave to the run, see run_tags.py
                         serving-<process>  flock of a process that serves the run
                         lock           flock by the executor that works on this run; shared: by `dflow sync`

Versions before had the state in a file of its own, state.jsonl: `_older_lines` reads it as lines of the log.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import attrs
from attrs import define, frozen

from dsl.convert import structure
from dsl.errors import StoreError, StructureError, UnknownName
from dsl.files import LineReader, append_lines, clear_errors, known_fields, open_own, read_lines, write_json
from dsl.finding import Finding
from dsl.graph import Graph
from executor.keys.node_key import KeyParts
from executor.records.graph_file import (
    damaged,
    load_graph,
    recorded_nodes,
    recorded_table,
    save_graph,
)
from executor.records.run_tags import tagged_folder, tags_of
from executor.store.names import RUN_ID
from executor.system.file_locks import is_held, shared_gc_lock, take
from executor.system.json_values import (
    Check,
    fit,
    is_flag,
    is_id,
    is_list_of,
    is_moment,
    is_node_id,
    is_number,
    is_one_of,
    is_table_of,
    is_text,
    is_whole,
    or_none,
)
from executor.system.symlinks import links_in, refuse_links

if TYPE_CHECKING:
    from executor.records.events import Body, Event

LOG = "events.jsonl"
GOES_ON = "wait for the run, which goes on"
OLDER_STATE = "state.jsonl"
PLAN = "plan.json"
FIGURES = "figures"

State = Literal["pending", "running", "done", "failed"]
Status = Literal["running", "done", "failed", "stopped", "killed"]
StartedBy = Literal["run", "evaluate"]
NOT_RUN = "not run: "
# The kinds of the lines that hold a state. They are found by their text: a log may have millions of others.
RUN, NODE = "run", "state"
STATE_LINE = re.compile(rb'"kind":"(?:run|state)"')
# A node's change in the log, and its state after it.
WAITS: Mapping[str, State] = {"retry": "pending", "outdated": "pending"}


@define(kw_only=True)
class NodeState:
    """The state of one node of a run.

    seconds: of all attempts whose work is in the artifact, by a monotonic clock. attempt_seconds: of the last one, if
    there were several. memory and gpu_memory: peak bytes of all ranks of the stage. gpu: the name of the GPU that it
    computed on; empty without one.
    acceptance: as in the index. warnings: the texts of `stage.warn`, each once. failure: also of one that is retried.
    """

    state: State = "pending"
    cache: str | None = None
    key: str | None = None
    digest: str | None = None
    reason: str = ""
    seconds: float | None = None
    attempt_seconds: float | None = None
    started: float | None = None
    ended: float | None = None
    attempt: int = 0
    metrics: dict[str, float] = attrs.Factory(dict)
    warnings: list[str] = attrs.Factory(list)
    source_run: str | None = None
    memory: int | None = None
    gpu_memory: int | None = None
    gpu: str = ""
    acceptance: str = ""
    failure: Finding | None = None

    @property
    def error(self) -> str | None:
        return None if self.failure is None else self.failure.what

    @property
    def is_blocked(self) -> bool:
        """Whether the node did not run because another one failed; its reason names that node."""
        return self.state == "pending" and self.reason.startswith(NOT_RUN)


@define(kw_only=True)
class RunState:
    """The state of a run.

    pinned: node -> digest that is used unconditionally. forced: nodes that run even if cached. goes_on_from: the run
    that `resume -s` continued with other values. result_nodes: nodes whose metrics are the pipeline's results.
    results_run: the run that computed these. judged_by: metrics that measure the quality of the results. tracking:
    whether MLflow gets the run automatically. started_by: the command that made it. file: the absolute path of
    the pipeline file; empty for none, and in records of earlier versions. name: as the user gave it. overrides: values
    that `-s` changed in nodes, an earlier run's first.
    """

    run: str
    pipeline: str
    experiment: str
    tracking_uri: str | None = None
    tracking: bool = True
    status: Status = "running"
    started_by: StartedBy = "run"
    file: str = ""
    started: float = 0.0
    ended: float | None = None
    pinned: dict[str, str] = attrs.Factory(dict)
    forced: list[str] = attrs.Factory(list)
    goes_on_from: str | None = None
    result_nodes: list[str] = attrs.Factory(list)
    results_run: str | None = None
    judged_by: list[str] = attrs.Factory(list)
    name: str = ""
    overrides: list[str] = attrs.Factory(list)
    nodes: dict[str, NodeState] = attrs.Factory(dict)

    @property
    def has_run(self) -> bool:
        """Whether any stage ran."""
        return any(node.cache in ("miss", "resumed") for node in self.nodes.values())

    @property
    def is_for_mlflow(self) -> bool:
        """Whether the run belongs in MLflow; it does not if all its results are another run's."""
        return self.has_run or self.results_run == self.run


@frozen(kw_only=True)
class PlanRow:
    """The row of a node in plan.json. parents: ids.

    reason, parts: only for a node that was not cached; the manifest of a cached artifact holds its key parts.
    """

    cache: str
    key: str | None
    parents: tuple[str, ...]
    reason: str = ""
    parts: KeyParts | None = None

    def to_json(self) -> dict[str, Any]:
        row = {"cache": self.cache, "key": self.key, "parents": list(self.parents)}
        return row if self.parts is None else {**row, "reason": self.reason, "parts": self.parts.to_json()}


class Record:
    """A run's folder under records/, with its state, plan and log."""

    def __init__(self, folder: Path, state: RunState) -> None:
        self.folder = folder
        self.state = state
        self._lock: int | None = None

    @classmethod
    def prepare(
        cls, records: Path, graph: Graph, *, nodes: Mapping[str, NodeState] | None = None, **state: Any
    ) -> Record:
        """Create a record for a new run, visible once it is saved.

        Its id sorts after all others, such as 20261121-183012-ab12.
        """
        folder = _new_folder(records)
        save_graph(folder, graph)
        run_state = RunState(
            run=folder.name,
            pipeline=graph.name,
            experiment=graph.experiment,
            tracking_uri=graph.tracking_uri,
            tracking=graph.tracking,
            started=time.time(),
            result_nodes=list(graph.result_nodes),
            judged_by=sorted(graph.judged_by),
            nodes={node: NodeState() for node in graph.nodes} if nodes is None else dict(nodes),
            **state,
        )
        return cls(folder, run_state)

    @classmethod
    def load(cls, folder: Path) -> Record:
        """Load the record in a folder. Raises StoreError where it is missing, incomplete or damaged, or its log is a
        link.
        """
        try:
            state = fold([*LineReader(folder / LOG, only=STATE_LINE).read(), *_older_lines(folder)], folder.name)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise damaged(folder, LOG) from error
        if state is None:
            refuse_links([folder / LOG])
            raise StoreError(f"{folder}: the record of this run is incomplete (it has no {LOG})")
        return cls(folder, state)

    def find_results_run(self, graph: Graph) -> str | None:
        """The run whose results MLflow shows: this one if a stage ran in it, else the run that made the last node's
        artifact.

        For a sweep, it is another run only if that run has the same nodes and made all the combinations. A sweep that
        combines artifacts of several runs is a comparison of its own.
        """
        nodes = self.state.nodes
        if self.state.has_run:
            return self.run
        copies = [node_id for node_id, node in graph.nodes.items() if node.copy is not None]
        if not copies:
            return next((node.source_run for node in reversed(nodes.values()) if node.source_run), None)
        results = set(graph.result_nodes)
        makers = {nodes[node_id].source_run for node_id in copies if node_id in results}
        maker = makers.pop() if len(makers) == 1 else None
        other = load_begun(self.folder.parent / maker) if maker is not None else None
        return self.run if other is None or other.state.nodes.keys() != nodes.keys() else maker

    def reload(self) -> None:
        """Read the state again: another process may have written it before this one got the lock."""
        self.state = Record.load(self.folder).state

    @property
    def run(self) -> str:
        return self.state.run

    @property
    def events_path(self) -> Path:
        return self.folder / LOG

    def graph(self) -> Graph:
        """Load the run's graph; see `load_graph`."""
        return load_graph(self.folder)

    def op_names(self) -> dict[str, str]:
        """The name of each node's op, by node id; the ops themselves need not exist any more."""
        return {node_id: node.op for node_id, node in recorded_nodes(self.folder).items()}

    def plan(self) -> dict[str, PlanRow]:
        """The rows of the run's plan by node; empty where there is no plan. Raises StoreError where it is damaged."""
        return _read_plan(self.folder)

    def save(self, change: str = "") -> None:
        """Write the state of the run, without its nodes. change: "started" where work begins."""
        self._append([self._run_line(change)])

    def save_node(self, node: str, change: str = "", **more: Any) -> None:
        """Append a node's state to the log. change: "retry" or "outdated" where the node waits for another attempt.
        more: fields of that line only.
        """
        self._append([{**self._node_line(node, change), **more}])

    def save_nodes(self, nodes: Iterable[str]) -> None:
        """Append the states of several nodes to the log, in one write."""
        self._append(list(map(self._node_line, nodes)))

    def save_all(self) -> None:
        """Append the states of the run and every node to the log, in one write."""
        self._append([self._run_line(), *map(self._node_line, self.state.nodes)])

    def _run_line(self, change: str = "") -> dict[str, Any]:
        state = self.state
        return _line(RUN, "", 0, change or ("planned" if state.status == "running" else state.status), _changed(state))

    def _node_line(self, node: str, change: str = "") -> dict[str, Any]:
        state = self.state.nodes[node]
        failure = {} if state.failure is None else {"failure": state.failure.to_json()}
        return _line(NODE, node, state.attempt, change or state.state, {**_changed(state), **failure})

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines to the log in one write; an older version's state is added to the log first."""
        older = _older_lines(self.folder)
        if older or lines:
            append_lines(self.folder / LOG, [*older, *lines])
        if older:
            (self.folder / OLDER_STATE).unlink(missing_ok=True)

    def save_plan(self, rows: Mapping[str, PlanRow]) -> None:
        write_json(self.folder / PLAN, {node: row.to_json() for node, row in rows.items()}, in_one_line=True)

    def log_path(self, node: str) -> Path:
        return self.folder / f"{node}.log"

    def figures_path(self, node: str) -> Path:
        """The folder of the figures that the node drew."""
        return self.folder / FIGURES / node

    def event(self, node: str, body: Body) -> None:
        """Append an event of a node to the run's log."""
        from executor.records.events import Event  # on no way of a run in which nothing runs

        self.write_events([Event(time.time(), node, self.state.nodes[node].attempt, body)])

    def write_events(self, events: Iterable[Event]) -> None:
        """Append several events to the run's log, in one write."""
        self._append([event.to_json() for event in events])

    def lock(self, *, to_send: bool = False) -> None:
        """Lock the run for the life of this process, which executes it. to_send: a shared lock, to send it to MLflow.

        Raises StoreError where another process has the lock, or the record contains a link.
        """
        if self._lock is not None:
            return
        refuse_links(links_in(self.folder))
        descriptor = open_own(self.folder / "lock", os.O_RDWR | os.O_CREAT)
        if not take(descriptor, fcntl.LOCK_SH if to_send else fcntl.LOCK_EX):
            os.close(descriptor)
            is_alive = "still running; wait for it, or stop it first"
            is_sent = "being sent to MLflow by `dflow sync`; wait for that"
            raise StoreError(f"run {self.run} is {is_alive if self.is_alive() else is_sent}")
        self._lock = descriptor

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def to_finish(self) -> str:
        """What to do for nodes that are not made yet: to wait for a run that goes on, else to resume it."""
        return GOES_ON if self.status() == "running" else f"run `dflow resume {self.run}` first"

    def status(self) -> Status:
        """The recorded status; "killed" if the record says "running" but no process works on the run."""
        is_killed = self.state.status == "running" and not self.is_alive()
        return "killed" if is_killed else self.state.status

    @property
    def repeats(self) -> bool:
        """Whether nothing ran in this run, and another run of the store has the same nodes with the same keys."""
        state = self.state
        if state.status != "done" or state.is_for_mlflow or state.results_run is None:
            return False
        other = load_begun(self.folder.parent / state.results_run)
        keys = {} if other is None else {node_id: node.key for node_id, node in other.state.nodes.items()}
        return all(node.key is not None and keys.get(node_id) == node.key for node_id, node in state.nodes.items())

    def stopped_at(self) -> float:
        """The time at which work on the run ended, in seconds since 1970; for a killed run, the record's
        last change.
        """
        if self.state.ended is not None:
            return self.state.ended
        files = [file for file in (self.folder / OLDER_STATE, self.events_path) if file.exists()]
        return max((file.stat().st_mtime for file in files), default=self.state.started)

    def seconds(self) -> float:
        """The seconds for which an executor worked on the run, up to now if it is running.

        The time between an end and a resumption does not count. If nothing ran, the seconds from start to end. `dflow
        runs`, `dflow status`, the report and MLflow all show this value.
        """
        from executor.records.events import read_events, worked_seconds

        now = time.time() if self.status() == "running" else None
        worked = worked_seconds(read_events(self.events_path), now)
        end = self.state.ended or now
        return worked or (0.0 if end is None else max(0.0, end - self.state.started))

    def is_alive(self) -> bool:
        """Whether a process executes this run."""
        return is_held(self.folder / "lock")

    def is_locked(self) -> bool:
        """Whether a process executes or sends this run."""
        return is_held(self.folder / "lock", exclusive=False)


def _changed(state: NodeState | RunState) -> dict[str, Any]:
    """The fields that differ from their defaults, without the nodes of a run."""
    values = {name: getattr(state, name) for name in _DEFAULTS[type(state)] if name != "nodes"}
    return {name: value for name, value in values.items() if value != _DEFAULTS[type(state)][name]}


_DEFAULTS = {
    type(state): {name: getattr(state, name) for name in attrs.fields_dict(type(state))}
    for state in (NodeState(), RunState(run="", pipeline="", experiment=""))
}


_CHECKS: Mapping[type, Mapping[str, Check]] = {
    NodeState: {
        "state": is_one_of(get_args(State)),
        "cache": or_none(is_text),
        **dict.fromkeys(("key", "digest", "source_run"), or_none(is_id)),
        **dict.fromkeys(("reason", "acceptance", "gpu"), is_text),
        **dict.fromkeys(("seconds", "attempt_seconds"), or_none(is_number)),
        **dict.fromkeys(("started", "ended"), or_none(is_moment)),
        "attempt": is_whole,
        "metrics": is_table_of(is_number),
        "warnings": is_list_of(is_text),
        **dict.fromkeys(("memory", "gpu_memory"), or_none(is_whole)),
    },
    RunState: {
        "run": is_id,
        **dict.fromkeys(("pipeline", "experiment", "file", "name"), is_text),
        "tracking_uri": or_none(is_text),
        "tracking": is_flag,
        "status": is_one_of(get_args(Status)),
        "started_by": is_one_of(get_args(StartedBy)),
        "started": is_moment,
        "ended": or_none(is_moment),
        "pinned": is_table_of(is_id),
        **dict.fromkeys(("forced", "result_nodes", "judged_by", "overrides"), is_list_of(is_text)),
        **dict.fromkeys(("goes_on_from", "results_run"), or_none(is_id)),
        "nodes": lambda value: False,  # they have lines of their own
    },
}
T = TypeVar("T", NodeState, RunState)


def _checked(cls: type[T], line: Mapping[str, Any]) -> T:
    """The fields of a state line, checked. Raises ValueError for values that dflow does not write.

    Names become paths and numbers become dates, so that they must be valid.
    """
    if not fit(_CHECKS[cls], line):
        raise ValueError(f"not the state of a {cls.__name__}")
    return cls(**known_fields(cls, line))


def fold(lines: Iterable[Mapping[str, Any]], run: str) -> RunState | None:
    """The state of a run, made from its log: for the run and for each node the newest state line counts.

    None where no line holds the run's state. Raises ValueError for values that dflow does not write.
    """
    newest: dict[tuple[str, str], Mapping[str, Any]] = {}
    for line in lines:
        newest[line.get("kind", ""), line.get("node", "")] = line
    own = newest.pop((RUN, ""), None)
    if own is None:
        return None
    nodes = {node: line for (kind, node), line in newest.items() if kind == NODE}
    if not all(map(is_node_id, nodes)):  # they name files
        raise ValueError("not the id of a node")
    state = _checked(RunState, {**own, "run": run})
    for node, line in nodes.items():
        state.nodes[node] = _node_state(node, {**line, "state": WAITS.get(line["state"], line["state"])})
    return state


def _node_state(node: str, line: Mapping[str, Any]) -> NodeState:
    """A node's state from a line; older versions wrote a failure as text only. Raises ValueError as `_checked` does."""
    failure = line.get("failure")
    if failure is None and line.get("error") is not None:
        failure = {"node": node, "what": line["error"], "level": "error"}
    state = _checked(NodeState, {name: value for name, value in line.items() if name != "failure"})
    state.failure = None if failure is None else Finding.from_json(failure)
    return state


def _line(kind: str, node: str, attempt: int, change: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the log that holds a state; fields with their default are left out."""
    return {"time": time.time(), "kind": kind, **state, "node": node, "attempt": attempt, "state": change}


def _older_lines(folder: Path) -> list[dict[str, Any]]:
    """The newest states of a run and its nodes from an older version's state.jsonl, as log lines; empty without that
    file.

    They take precedence over the states in that version's log.
    """
    run: dict[str, Any] | None = None
    nodes: dict[str, dict[str, Any]] = {}
    for line in read_lines(folder / OLDER_STATE):
        run = line.get("run", run)
        if "node" in line:
            nodes[line["node"]] = line
    status = "running" if run is None else run.get("status", "running")
    own = [] if run is None else [_line(RUN, "", 0, "planned" if status == "running" else status, run)]
    return own + [
        _line(NODE, node, line.get("attempt", 0), line.get("state", "pending"), line) for node, line in nodes.items()
    ]


def _new_folder(records: Path) -> Path:
    """Create the folder of a new record. mkdir detects equal ids.

    An id ends with the fraction of the second in 65,536ths.
    """
    while True:
        now = time.time()
        run = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{int(now % 1 * 65536):04x}"
        newest = max((path.name for path in records.iterdir() if RUN_ID.fullmatch(path.name)), default="")
        folder = records / max(run, _next_id(newest))
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder


def _next_id(run: str) -> str:
    """The next possible id, for a run whose clock is behind the newest run's, because it was set back."""
    moment, _, fraction = run.rpartition("-")
    if not fraction.strip("f"):
        return f"{run}0"
    return f"{moment}-{int(fraction, 16) + 1:0{len(fraction)}x}"


def plan_of(folder: Path) -> dict[str, PlanRow]:
    """The plan in a record's folder by node; empty where it is missing or damaged."""
    try:
        return _read_plan(folder)
    except StoreError:
        return {}


def _read_plan(folder: Path) -> dict[str, PlanRow]:
    try:
        rows = recorded_table(folder, PLAN).items()
        return {node: structure(PlanRow, known_fields(PlanRow, row)) for node, row in rows}
    except (StructureError, AttributeError) as error:
        raise damaged(folder, PLAN) from error


def is_begun(folder: Path) -> bool:
    """Whether a folder has a record with a state; without one the run never started."""
    return os.path.lexists(folder / LOG) or os.path.lexists(folder / OLDER_STATE)


def load_begun(folder: Path) -> Record | None:
    """Load the record in a folder; None if it is missing or damaged, or was killed before its first state."""
    if not is_begun(folder):
        return None
    try:
        return Record.load(folder)
    except StoreError:
        return None


def newest_records(records: Path, pipeline: str | None = None) -> Iterator[Record]:
    """The records from the newest to the oldest. pipeline: only runs of this pipeline."""
    if not records.is_dir():
        return
    for folder in sorted(records.iterdir(), reverse=True):
        record = load_begun(folder)
        if record is not None and pipeline in (None, record.state.pipeline):
            yield record


def linked_logs(records: Path) -> list[Path]:
    """The run logs that are links; they are not followed, so their runs cannot be read."""
    return sorted(log for log in records.glob(f"*/{LOG}") if log.is_symlink())


def newest_that_ran(records: Path) -> Iterator[Record]:
    """The records from the newest to the oldest, without runs in which nothing ran."""
    return (record for record in newest_records(records) if not record.repeats)


def find_record(records: Path, run: str | None) -> Record:
    """The record of a run by its tag, its id or a part of the id.

    None: the latest run in which something ran, else the latest run. Raises as `find_folder`, or StoreError.
    """
    if run is not None:
        return Record.load(find_folder(records, run))
    for record in (*islice(newest_that_ran(records), 1), *islice(newest_records(records), 1)):
        return record
    raise StoreError(no_run_text(records.parent))


def no_run_text(store: Path) -> str:
    return (
        f"{store}: the store holds no run yet; start one with `dflow run FILE`. Runs of a file elsewhere are in `runs` "
        "of that file's project: name it with --store"
    )


def find_folder(records: Path, run: str) -> Path:
    """The folder of a run's record by tag, id or a part of it, even if the record is damaged. Raises UnknownName."""
    tagged = tagged_folder(records, run)
    if tagged is not None:
        return tagged
    folders = sorted(records.iterdir()) if records.is_dir() else []
    ends = [folder for folder in folders if folder.name.startswith(run) or folder.name.endswith(run)]
    named = ends or [folder for folder in folders if run in folder.name]
    if len(named) != 1:
        found = ", ".join(_with_tags(folder) for folder in (named or folders)[-5:]) or "none"
        if Path(run).suffix in (".toml", ".py"):
            found += f"; to run a pipeline: dflow run {run}"
        problem = "fits several runs" if named else "is no run of this store"
        raise UnknownName(f'"{run}" {problem}; runs: {found}')
    return named[0]


def _with_tags(folder: Path) -> str:
    return " ".join([folder.name, *(f"({tag})" for tag in tags_of(folder))])


@contextmanager
def serving(store: Path, record: Path) -> Iterator[None]:
    """Open a context in which `dflow gc` does not remove the run; waits for a running gc first.

    Raises StoreError where the record contains a link.
    """
    lock = record / f"serving-{os.getpid()}"
    with shared_gc_lock(store), clear_errors(lock):
        refuse_links(links_in(record))
        descriptor = open_own(lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def is_served(record: Path) -> bool:
    """Whether the run of this record is being served."""
    return any(is_held(lock) for lock in record.glob("serving-*"))
