"""A planned run: its graph, its plan, and the record to write to; which nodes commands select, and which they refuse.

`--to NODE` is that node and all above it, `--only NODE` these nodes and nothing else. NODE is a node's id, or that of a
node with copies, which selects all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from dsl.check import Absent
from dsl.compile import override_graph
from dsl.errors import PipelineError, StoreError, known_nodes
from dsl.files import free_bytes, is_there
from dsl.finding import Field, Finding
from dsl.graph import Graph, GraphNode
from dsl.tree import changed_values, overridden_nodes
from executor.keys.node_key import Sources, graph_parts, named_paths
from executor.launchers.cluster_address import with_recorded_cluster
from executor.planning.history import Content, PreviousNodes, SourceRuns
from executor.planning.planner import Decision, Planner, earlier_rule_note, kept_text
from executor.records.run_record import NodeState, PlanRow, Record, StartedBy, find_record
from executor.store.artifact_store import Store
from executor.system.file_locks import shared_gc_lock

if TYPE_CHECKING:
    from executor.planning.preflight import Estimates


@frozen
class Session:
    """The data of a run that the scheduler (run_loop.py) needs. Cached nodes are already marked as done in the record.

    notes: on nodes kept although their data is gone, and on nodes that run although an earlier dflow may have made the
    same.
    """

    store: Store
    record: Record
    planner: Planner
    decisions: Mapping[str, Decision]
    is_resumed: bool = False
    notes: tuple[str, ...] = ()

    @property
    def graph(self) -> Graph:
        return self.planner.graph

    @property
    def is_complete(self) -> bool:
        """Whether every node was already done before anything ran."""
        return all(node.state == "done" for node in self.record.state.nodes.values())


def selected(graph: Graph, to: Sequence[str], only: Sequence[str]) -> tuple[Graph, tuple[str, ...]]:
    """The part of the graph that is needed, and the ids of the nodes of `--only`. Raises PipelineError for an unknown
    node.
    """
    if to and only:
        raise PipelineError([Finding("--to runs what is above a node, --only does not", advice="give one of them")])
    given = [("--to", node_id) for node_id in to] or [("--only", node_id) for node_id in only]
    mistakes = [
        Finding(f'{flag}: there is no node "{name}"', advice=known_nodes(name, graph.nodes))
        for flag, name in given
        if not graph.selected_by(name)
    ]
    if mistakes:
        raise PipelineError(mistakes)
    nodes = tuple(node_id for _flag, name in given for node_id in graph.selected_by(name))
    return graph.up_to(nodes) if given else graph, nodes if only else ()


def require_node(graph: Graph, node_id: str) -> None:
    """Check that a graph has a node. Raises PipelineError."""
    if node_id not in graph.nodes:
        copies = graph.selected_by(node_id)
        hint = f"its copies: {', '.join(copies)}" if copies else known_nodes(node_id, graph.nodes)
        raise PipelineError([Finding(f'there is no node "{node_id}"', advice=hint)])


def make_planner(
    store: Store,
    graph: Graph,
    pinned: Mapping[str, str] | None = None,
    forced: Iterable[str] = (),
    absent: Absent | None = None,
    source: str = "RUN",
) -> Planner:
    """A planner for the graph with current code and data; the data of pinned nodes is not read.

    absent: nodes whose data is missing. Their keys use the digests in the newest record with the same paths; without
    one they have no keys. source: the run that made the pinned artifacts. Raises PipelineError if an external input
    cannot be read.
    """
    pinned, absent = pinned or {}, absent or {}
    previous = PreviousNodes(store, graph.name)
    gone = [node_id for node_id in absent if node_id in graph.nodes and node_id not in pinned]
    contents = {node_id: previous.content(graph.nodes[node_id]) for node_id in gone}
    known = {node_id: _gone(graph.nodes[node_id], each) for node_id, each in contents.items() if each is not None}
    unknown = [node_id for node_id in gone if node_id not in known]
    try:
        parts = graph_parts(graph, Sources.now(store.external_memo), without={*pinned, *unknown}, known=known)
    except PipelineError as error:
        missing = [mistake for node_id in unknown for mistake in absent[node_id]]
        raise PipelineError([*missing, *error.mistakes]) from error
    return Planner(
        graph=graph,
        parts=parts,
        store=store,
        previous=previous,
        pinned=pinned,
        forced=frozenset(forced),
        absent=frozenset(unknown),
        recorded={node_id: each.run for node_id, each in contents.items() if each is not None},
        source=source,
    )


def _gone(node: GraphNode, content: Content) -> dict[str, str]:
    """The recorded digests of a node's paths that no longer exist, and of files that only these name."""
    there = {name for name, path in named_paths(node).items() if is_there(path)}
    return {name: digest for name, digest in content.digests.items() if name not in there}


def new_run(
    store: Store,
    graph: Graph,
    only: Collection[str] = (),
    given: Graph | None = None,
    started_by: StartedBy = "run",
    absent: Absent | None = None,
    file: str = "",
    name: str = "",
    overrides: Sequence[str] = (),
) -> Session:
    """Plan a new run of a graph, and write its record.

    only: the nodes that may run (default: all). given: in a trial run, the full graph. absent: missing files and
    folders; a node that names some is taken from the store, or refused. file: the pipeline file's absolute path. name,
    overrides: as the user gave them. Raises PipelineError if another node would have to run, or this machine lacks
    something that a node needs.
    """
    with shared_gc_lock(store.path):
        planner = make_planner(store, graph, absent=absent)
        if given is not None:
            planner = attrs.evolve(planner, given={node_id: node.config for node_id, node in given.nodes.items()})
        return _new(
            store,
            planner,
            {},
            absent,
            only,
            started_by=started_by,
            file=file,
            name=name,
            overrides=changed_values(overrides),
        )


def resumed_run(store: Store, run: str | None, overrides: Sequence[str]) -> Session:
    """Continue a run: done nodes stay done, forced nodes stay forced, and the graph is the recorded one.

    With overrides a new record is made instead; only nodes at or below an override are decided again.
    """
    record = find_record(store.records, run)
    with shared_gc_lock(store.path):
        return _resumed_with(store, record, overrides) if overrides else _resumed(store, record)


def _resumed(store: Store, record: Record) -> Session:
    record.lock()
    record.reload()
    graph = with_recorded_cluster(record.graph())
    # A kill may have cut off the first lines of the state.
    record.state.nodes = {node_id: record.state.nodes.get(node_id, NodeState()) for node_id in graph.nodes}
    done = _done(store, record)
    for node_id, node in record.state.nodes.items():
        if node_id not in done:
            kept = {name: getattr(node, name) for name in ("attempt", "metrics", "cache", "started")}
            record.state.nodes[node_id] = NodeState(**kept)
    pinned = {**record.state.pinned, **done}
    planner = attrs.evolve(make_planner(store, graph, pinned, record.state.forced, source=record.run), run=record.run)
    return attrs.evolve(_session(store, record, planner, _checked_plan(store, planner), record.plan()), is_resumed=True)


def _resumed_with(store: Store, source: Record, overrides: Sequence[str]) -> Session:
    absent: Absent = {}
    graph = override_graph(with_recorded_cluster(source.graph()), overrides, absent)
    rerun = {node_id for owner in overridden_nodes(overrides).values() for node_id in graph.below(owner)}
    done = {node_id: digest for node_id, digest in _done(store, source).items() if node_id not in rerun}
    pinned = {node_id: digest for node_id, digest in source.state.pinned.items() if node_id not in rerun}
    forced = [node_id for node_id in source.state.forced if node_id not in done]
    planner = make_planner(store, graph, {**pinned, **done}, forced, absent, source.run)
    nodes = {node_id: _pinned_state(source, node_id) for node_id in done}
    return _new(
        store,
        planner,
        nodes,
        absent,
        source=source,
        pinned=pinned,
        forced=forced,
        goes_on_from=source.run,
        overrides=[*source.state.overrides, *changed_values(overrides)],
    )


def run_from(store: Store, run: str | None, starts: Sequence[str], overrides: Sequence[str]) -> Session:
    """A new record in which `starts` and all below them run again; other nodes keep the artifacts of the source.

    Other nodes that the source did not finish run as well. Raises PipelineError for an unknown node or an override
    above it, and StoreError if an artifact is missing.
    """
    source = find_record(store.records, run)
    recorded = with_recorded_cluster(source.graph())
    unknown = [
        Finding(f'--from: run {source.run} has no node "{name}"', advice=known_nodes(name, recorded.nodes))
        for name in starts
        if not recorded.selected_by(name)
    ]
    if unknown:
        raise PipelineError(unknown)
    absent: Absent = {}
    graph = override_graph(recorded, overrides, absent)
    rerun = {below for name in starts for start in graph.selected_by(name) for below in graph.below(start)}
    outside = [override for override, owner in overridden_nodes(overrides).items() if owner not in rerun]
    if outside:
        hint = f"other nodes keep their artifacts; start from that node, or use `dflow run` with -s {outside[0]}"
        below = f"not at or below {' or '.join(starts)}"
        raise PipelineError([Finding(f"-s {override}: {below}", advice=hint) for override in outside])
    above = graph.up_to(list(rerun)).nodes
    pinned = {}
    for other, state in source.state.nodes.items():
        if other not in rerun and state.digest is not None:
            pinned[other] = state.digest
        elif other not in rerun and other in above:
            raise StoreError(
                f'node "{other}" was not finished in run {source.run}, so nothing can start below it; '
                f"finish it with `dflow resume {source.run}`"
            )
    states = {other: _pinned_state(source, other) for other in pinned}
    with shared_gc_lock(store.path):
        planner = make_planner(store, graph, pinned, rerun, absent, source.run)
        changed = [*source.state.overrides, *changed_values(overrides)]
        return _new(
            store, planner, states, absent, source=source, pinned=pinned, forced=sorted(rerun), overrides=changed
        )


def check_inputs(
    store: Store, record: Record, starts: Sequence[str], overrides: Sequence[str], report: Callable[[str], None]
) -> None:
    """Verify the artifacts that a resumed run will read. A damaged one is reported and set aside, so that its node
    reruns.

    starts: the nodes of --from, or those whose copies are. Raises StoreError if a damaged artifact cannot be set aside.
    """
    from executor.store.integrity import check, set_aside  # of no use to a plan

    graph, nodes = record.graph(), record.state.nodes
    rerun = set() if starts else {node_id for node_id, node in nodes.items() if node.state != "done"}
    started = [node_id for name in starts for node_id in graph.selected_by(name)]
    owners = started or overridden_nodes(overrides).values()
    rerun = rerun.union(*(graph.below(node_id) for node_id in owners if node_id in graph.nodes))
    checked: set[str] = set()
    while True:
        parents = {parent for node_id in rerun for parent in graph.nodes[node_id].parents if parent not in rerun}
        digests = {node_id: nodes[node_id].digest for node_id in graph.nodes if node_id in parents}
        unchecked = {digest for digest in digests.values() if digest is not None} - checked
        if not unchecked:
            return
        checked |= unchecked
        damages = check(store, sorted(unchecked))
        set_aside(store, damages)
        for node_id, digest in digests.items():
            if digest in damages:
                rerun.add(node_id)  # so that its inputs are checked as well
                report(f'the artifact of node "{node_id}" was damaged after its commit: {damages[digest][-1]}')


def _done(store: Store, record: Record) -> dict[str, str]:
    """The digests of the nodes that the run finished and whose artifacts still exist."""
    states = record.state.nodes.items()
    digests = {node_id: node.digest for node_id, node in states if node.state == "done" and node.digest is not None}
    return {node_id: digest for node_id, digest in digests.items() if store.has(digest)}


def _pinned_state(source: Record, node_id: str) -> NodeState:
    """The state of an earlier run's node, copied for the record of a new run."""
    state = source.state.nodes[node_id]
    return NodeState(
        state="done",
        cache="hit",
        key=state.key,
        digest=state.digest,
        reason=f"kept from run {source.run}",
        metrics=state.metrics,
        warnings=state.warnings,
        source_run=state.source_run or source.run,
    )


def _new(
    store: Store,
    planner: Planner,
    nodes: Mapping[str, NodeState],
    absent: Absent | None,
    only: Collection[str] = (),
    *,
    source: Record | None = None,
    **state: Any,
) -> Session:
    """A session with a new record. nodes: states from an earlier run, `source`."""
    decisions = _checked_plan(store, planner, absent, only)
    fresh = {node_id: nodes.get(node_id, NodeState()) for node_id in planner.graph.nodes}
    rows: Mapping[str, PlanRow] = {}
    if source is not None:
        rows = source.plan()
        state |= {"started_by": source.state.started_by, "file": source.state.file}
    record = Record.prepare(store.records, planner.graph, nodes=fresh, **state)
    session = _session(store, record, attrs.evolve(planner, run=record.run), decisions, rows)
    gone = {node_id: planner.recorded.get(node_id, planner.source) for node_id in absent or () if node_id in decisions}
    kept = tuple(f"{node_id}: {kept_text(run)}" for node_id, run in gone.items())
    return attrs.evolve(session, notes=(*session.notes, *kept))


def _session(
    store: Store, record: Record, planner: Planner, decisions: Mapping[str, Decision], earlier: Mapping[str, PlanRow]
) -> Session:
    """A session for a run: locks its record, and writes the plan with its cache hits. Pinned nodes keep their plan
    rows.

    The log of a finished run stays unchanged, as long as all its artifacts still exist.
    """
    record.lock()
    sources = SourceRuns(store)
    for node_id, decision in decisions.items():
        node = record.state.nodes[node_id]
        if decision.cache == "hit" and node.state != "done":
            sources.set_hit(record, node_id, decision)
        elif node.state != "done":
            node.key, node.reason = decision.key, decision.reason
    rows = {node_id: plan_row(planner, node_id, decisions[node_id]) for node_id in planner.parts}
    kept = {node_id: row for node_id, row in earlier.items() if node_id in planner.pinned}
    record.save_plan({**rows, **kept})
    if record.state.status != "done" or any(node.state != "done" for node in record.state.nodes.values()):
        record.state.status = "running"
        record.state.ended = None
        record.save_all()
    note = earlier_rule_note(decisions)
    return Session(store, record, planner, decisions, notes=(note,) if note else ())


def _checked_plan(
    store: Store, planner: Planner, absent: Absent | None = None, only: Collection[str] = ()
) -> dict[str, Decision]:
    """The plan of a run, checked before it starts.

    Raises PipelineError if a node would run whose data is missing or that `only` does not name, or if this machine
    lacks something that a node needs.
    """
    decisions = planner.plan()
    require_others(decisions, only)
    missing, _ = refusals(store, planner.graph, decisions, absent or {}, free_bytes(store.path))
    if missing:
        raise PipelineError(missing)
    return decisions


def refusals(
    store: Store, graph: Graph, decisions: Mapping[str, Decision], absent: Absent, free_disk: int
) -> tuple[list[Finding], Estimates | None]:
    """All mistakes for which a run is refused, and the graph's estimates; None for these if nothing runs."""
    if all(decision.cache == "hit" for decision in decisions.values()):
        return [], None
    from executor.planning.preflight import preflight  # loads the hooks of ops

    lacking, estimates = preflight(store, graph, decisions, free_disk)
    return [*missing_data(decisions, absent), *lacking], estimates


def missing_data(decisions: Mapping[str, Decision], absent: Absent) -> list[Finding]:
    """Mistakes about missing data of nodes that would have to run, and why a recorded artifact cannot replace it."""
    needed = {node_id: each for node_id, each in decisions.items() if node_id in absent and each.cache != "hit"}
    kept = "bring the data back, or keep what the last run made: dflow resume --from NODE"
    reasons = [
        Finding(f"its artifact in the store is another one: {decision.reason}", Field(f"node.{node_id}"), kept)
        for node_id, decision in needed.items()
        if decision.key is not None
    ]
    return [*(mistake for node_id in needed for mistake in absent[node_id]), *reasons]


def require_others(decisions: Mapping[str, Decision], only: Collection[str]) -> None:
    """Check that only nodes named by `--only` have to run. Raises PipelineError."""
    lacking = {node_id: each for node_id, each in decisions.items() if node_id not in only and each.cache != "hit"}
    if only and lacking:
        reasons = "; ".join(f"{node_id} ({decision.reason})" for node_id, decision in lacking.items())
        hint = f"name them too, or run everything above with --to {list(decisions)[-1]}"
        if all(decision.reason != "new" for decision in lacking.values()):
            hint += f"; to keep what the last run made: dflow resume --from {next(iter(only))}"
        raise PipelineError([Finding(f"--only: not in the store: {reasons}", advice=hint)])


def plan_row(planner: Planner, node_id: str, decision: Decision) -> PlanRow:
    parents = planner.graph.nodes[node_id].parents
    if decision.cache == "hit":
        return PlanRow(cache="hit", key=decision.key, parents=parents)
    parts = planner.parts[node_id]
    return PlanRow(cache=decision.cache, key=decision.key, parents=parents, reason=decision.reason, parts=parts)
