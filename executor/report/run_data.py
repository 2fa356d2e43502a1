"""What a report shows of a run, read from its record, its events, and the store, as far as they still exist."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen

from dsl.artifact_digest import MANIFEST
from dsl.convert import flat
from dsl.errors import DflowError, NotTrusted, StoreError, UnknownName, did_you_mean
from dsl.finding import Finding, Node
from executor.records.events import NodeEvents, read_events
from executor.records.graph_file import RecordedNode, recorded_nodes, recorded_op_files
from executor.records.run_record import FIGURES, LOG, NodeState, PlanRow, Record, find_record, load_begun, plan_of
from executor.records.run_tags import tags_of
from executor.results.sweep import CombinationsTable, Row, combinations, sorted_rows, sweep_cells
from executor.store.artifact_store import Store
from executor.store.manifest import Manifest, own_files
from executor.store.names import RUN_ID
from executor.system.symlinks import is_plain
from executor.system.trust import require_own_store

MOST_COLUMNS = 16  # of all combinations: a table of more is not read


@frozen(kw_only=True)
class NodeFacts:
    """A node of a run, as the report shows it. state: as recorded; "interrupted" if it was running when the run ended.

    seconds, memory, gpu_memory: what making the artifact took, in this run or in source_run. size, folder: of the
    artifact, in bytes; None where the store lacks it. own: files outside the digest by name, as the making run wrote
    them. manifest: of that run too. config, launch: as recorded; secrets appear as names, table values as "table.key".
    template: the node that a sweep copied, "" for no copy. beside: nodes that ran at the same time in the making run.
    """

    id: str
    op: str
    state: str
    recorded: NodeState
    seconds: float | None
    memory: int | None
    gpu_memory: int | None
    parents: tuple[str, ...]
    config: Mapping[str, Any]
    launch: Mapping[str, Any]
    manifest: Manifest | None
    folder: Path | None
    own: Mapping[str, Path]
    size: int | None
    events: NodeEvents
    figures: Mapping[str, Path]
    template: str = ""
    beside: tuple[str, ...] = ()

    @property
    def failure(self) -> Finding:
        """The finding on why the node failed."""
        return self.recorded.failure or Finding("no reason is recorded", Node(self.id))

    @property
    def is_gone(self) -> bool:
        """Whether the node had an artifact that the store no longer holds."""
        return self.recorded.digest is not None and self.folder is None

    @property
    def shown_state(self) -> str:
        """The state as one word; "cached" for a cache hit."""
        return "cached" if self.state == "done" and self.recorded.cache == "hit" else self.state


@frozen(kw_only=True)
class RunFacts:
    """A run, as the report shows it. op_files: None where they are not trusted. label: a short name.

    seconds: of work on it. results: the nodes with the pipeline's results. combinations: of its sweep, the best by the
    metric sorted_by first. combinations_table: from `sweep_cells`.
    """

    label: str
    record: Record
    status: str
    tags: Sequence[str]
    nodes: Mapping[str, NodeFacts]
    seconds: float = 0.0
    results: Sequence[str] = ()
    combinations: Sequence[Row] = ()
    sorted_by: str = ""
    combinations_table: CombinationsTable = ((), [], 0)
    op_files: Sequence[Path] | None = ()
    damage: Sequence[str] = field(factory=list)

    @property
    def run(self) -> str:
        return self.record.run


def find_records(records: Path, runs: Sequence[str]) -> list[Record]:
    """The records of these runs, without repetition, in the order given; the newest for none.

    Raises UnknownName or StoreError with all runs that cannot be found or read.
    """
    found: dict[str, Record] = {}
    problems = []
    kind: type[StoreError] = UnknownName
    for run in runs or (None,):
        try:
            record = find_record(records, run)
            found.setdefault(record.run, record)
        except StoreError as error:
            names = _names(records)
            near = did_you_mean(run, names) if run is not None and run not in names else ""
            problems.append(f"{error} ({near})" if near else str(error))
            if not isinstance(error, UnknownName):
                kind = StoreError
    if problems:
        raise kind("\n".join(problems))
    return list(found.values())


def read_runs(store: Store, records: Sequence[Record]) -> list[RunFacts]:
    """The facts of all these runs for the report, in the order given."""
    labels = _labels([record.run for record in records])
    reader = _Reader(store)
    return [reader.run(label, record) for label, record in zip(labels, records, strict=True)]


class _Reader:
    """A reader of runs for the report; it reads each record and its events only once, even those of source runs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._events: dict[str, dict[str, NodeEvents]] = {}
        self._sources: dict[str, Mapping[str, NodeState]] = {}

    def run(self, label: str, record: Record) -> RunFacts:
        damage: list[str] = []
        status = record.status()
        recorded: Mapping[str, RecordedNode] = {}
        op_files: list[Path] | None = []
        try:
            recorded = recorded_nodes(record.folder)
            op_files = recorded_op_files(record.folder)
            if op_files:
                require_own_store(self._store.path)
        except NotTrusted as error:
            damage.append(f"what its own ops show is missing: {error}")
            op_files = None
        except StoreError as error:
            damage.append(str(error))
        rows, sorted_by, table = _combinations(record, recorded, damage)
        plan = plan_of(record.folder)
        self._sources[record.run] = record.state.nodes
        nodes: dict[str, NodeFacts] = {}
        for node_id in dict.fromkeys((*recorded, *record.state.nodes)):  # parents first, also where lines were lost
            if node_id in record.state.nodes:
                facts = recorded.get(node_id, RecordedNode())
                nodes[node_id] = self._node(record, node_id, facts, plan.get(node_id), status, nodes)
        return RunFacts(
            label=label,
            record=record,
            status=status,
            tags=tags_of(record.folder),
            nodes=nodes,
            seconds=record.seconds(),
            results=record.state.result_nodes,
            combinations=rows,
            sorted_by=sorted_by,
            combinations_table=table,
            op_files=op_files,
            damage=damage,
        )

    def _node(
        self,
        record: Record,
        node_id: str,
        recorded: RecordedNode,
        row: PlanRow | None,
        status: str,
        before: Container[str],
    ) -> NodeFacts:
        """The facts of one node of a run. before: the nodes that precede it in the order of the data."""
        state = record.state.nodes[node_id]
        manifest = self._store.manifest(state.digest) if state.digest is not None else None
        folder = self._store.object_path(state.digest) if manifest is not None and state.digest else None
        maker = state.source_run if state.cache == "hit" else record.run
        key = self._store.computed_key(maker, state.key)
        own = {} if folder is None else own_files(self._store.records, maker, key, folder)
        source, source_id = self._made_in(record, node_id, state)
        made = self._nodes_of(source).get(source_id, state)
        events = self._events_of(source).get(source_id, NodeEvents())
        return NodeFacts(
            id=node_id,
            op=recorded.op,
            state="interrupted" if state.state == "running" and status != "running" else state.state,
            recorded=state,
            seconds=state.seconds if state.seconds is not None else made.seconds,
            memory=state.memory if state.memory is not None else made.memory,
            gpu_memory=state.gpu_memory if state.gpu_memory is not None else made.gpu_memory,
            parents=tuple(parent for parent in (row.parents if row else ()) if parent in before),
            config=flat(recorded.config),
            launch=recorded.launch,
            manifest=Manifest.read(own[MANIFEST]) if MANIFEST in own else None,
            folder=folder,
            own=own,
            size=None if manifest is None else manifest.size,
            events=events,
            figures={
                file.stem: file
                for file in sorted((self._store.records / source / FIGURES / source_id).glob("*.png"))
                if is_plain(file, self._store.path)
            },
            template=recorded.copy.template if recorded.copy else "",
            beside=tuple(
                other_id
                for other_id, other in self._nodes_of(source).items()
                if other_id != source_id and _ran_together(made, other)
            ),
        )

    def _made_in(self, record: Record, node_id: str, state: NodeState) -> tuple[str, str]:
        """The run, and the node in it, that computed an artifact."""
        source = state.source_run
        if state.cache != "hit" or source is None:
            return record.run, node_id
        nodes = self._nodes_of(source)
        keys = (state.key, self._store.computed_key(source, state.key))
        same = [other_id for other_id, other in nodes.items() if other.key in keys and other.cache != "hit"]
        return source, same[0] if same else node_id

    def _nodes_of(self, run: str) -> Mapping[str, NodeState]:
        """The nodes of a run's record; none where it is gone or damaged."""
        if run not in self._sources:
            record = load_begun(self._store.records / run)
            self._sources[run] = record.state.nodes if record is not None else {}
        return self._sources[run]

    def _events_of(self, run: str) -> dict[str, NodeEvents]:
        if run not in self._events:
            nodes: dict[str, NodeEvents] = {}
            for event in read_events(self._store.records / run / LOG):
                nodes.setdefault(event.node, NodeEvents()).add(event)
            self._events[run] = nodes
        return self._events[run]


def _ran_together(one: NodeState, other: NodeState) -> bool:
    """Whether two nodes of a run ran at the same time, in their last attempts."""
    if one.started is None or one.ended is None or other.started is None or "hit" in (one.cache, other.cache):
        return False
    return other.started < one.ended and (other.ended is None or one.started < other.ended)


def _combinations(
    record: Record, recorded: Mapping[str, RecordedNode], damage: list[str]
) -> tuple[Sequence[Row], str, CombinationsTable]:
    """The combinations of a sweep, the metric that sorts them, and their table; empty if the ops cannot be loaded."""
    if all(node.copy is None for node in recorded.values()):
        return (), "", ((), [], 0)
    try:
        graph = record.graph()
    except DflowError as error:
        damage.append(f"the combinations of the sweep cannot be determined: {error}")
        return (), "", ((), [], 0)
    rows, sorted_by = sorted_rows(graph, record.state.nodes, combinations(graph))
    return rows, sorted_by, sweep_cells(graph, rows, sorted_by, has_state=True)


def _labels(runs: Sequence[str]) -> list[str]:
    """Short labels of runs: the last parts of their ids where these differ, else the whole ids."""
    ends = [run.rpartition("-")[2] for run in runs]
    return ends if len(set(ends)) == len(ends) else list(runs)


def _names(records: Path) -> list[str]:
    """The ids and tags of all runs."""
    folders = [folder for folder in records.iterdir() if RUN_ID.fullmatch(folder.name)] if records.is_dir() else []
    return [name for folder in folders for name in (folder.name, *tags_of(folder))]


def columns_of(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """The columns of the comparison: one for each run, or for each of a sweep's first combinations.

    In such a column the copies of a node have the name of the node in the file.
    """
    found: list[RunFacts] = []
    for run in runs:
        rows = run.combinations[: max(1, MOST_COLUMNS // len(runs))]
        found += [_column(run, row, is_alone=len(runs) == 1) for row in rows] if rows else [run]
    return found


def _column(run: RunFacts, row: Row, *, is_alone: bool) -> RunFacts:
    own = {node.id for node in row.combination.nodes}
    shown = {node_id: node for node_id, node in run.nodes.items() if not node.template or node_id in own}
    names = {node_id: node.template or node_id for node_id, node in shown.items()}
    nodes: Mapping[str, NodeFacts] = {name: run.nodes[node_id] for node_id, name in names.items()}
    name = row.combination.name
    results = [names[node_id] for node_id in run.results if node_id in names]
    return attrs.evolve(run, label=name if is_alone else f"{run.label}: {name}", nodes=nodes, results=results)
