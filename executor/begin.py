"""What a command starts from: a graph, a plan that knows earlier runs, and the record to write to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from dsl.errors import Mistake, PipelineError, StoreError, did_you_mean
from dsl.graph import Graph
from dsl.overrides import override_graph
from executor.keys import Sources, graph_parts, node_parts
from executor.plan import Decision, Planner, Previous
from executor.record import NodeState, Record, find_record, newest_records
from executor.store import Store
from executor.store_lock import while_nothing_goes
from executor.unmet import require_met

RECORDS_SEARCHED = 50


@frozen
class Session:
    """A planned run: all that the loop of run.py needs."""

    store: Store
    record: Record
    planner: Planner

    @property
    def graph(self) -> Graph:
        return self.planner.graph


def make_planner(
    store: Store, graph: Graph, pinned: Mapping[str, str] | None = None, forced: Iterable[str] = ()
) -> Planner:
    """A planner for the graph as it stands now; code and data of pinned nodes are not looked at.

    Raises DataError where an external input cannot be read.
    """
    pinned = pinned or {}
    parts = graph_parts(graph, Sources.now(store.external_memo), without=pinned)
    previous = previous_nodes(store.records, graph)
    return Planner(graph=graph, parts=parts, store=store, previous=previous, pinned=pinned, forced=frozenset(forced))


def refreshed(store: Store, planner: Planner, node_id: str) -> Planner:
    """The planner with one node's parts as they are now: code and data may change while the nodes above it run."""
    fresh = node_parts(planner.graph, node_id, Sources.now(store.external_memo))
    return attrs.evolve(planner, parts={**planner.parts, node_id: fresh})


@while_nothing_goes
def new_run(store: Store, graph: Graph) -> Session:
    """A fresh record for a graph. Raises PipelineError where a node that will run lacks something of this machine."""
    planner = make_planner(store, graph)
    require_met(planner)
    return _session(store, Record.create(store.records, graph), planner)


@while_nothing_goes
def resumed_run(store: Store, run: str | None, overrides: Sequence[str]) -> Session:
    """The same record goes on: what is done stays done, forced nodes stay forced, the graph is the recorded one.

    With overrides a new record is made instead; only nodes at or below an override are decided anew.
    """
    record = find_record(store.records, run)
    if overrides:
        return _resumed_with(store, record, overrides)
    record.lock()
    record.reload()
    done = _done(store, record)
    for node_id, node in record.state.nodes.items():
        if node_id not in done:
            kept = {name: getattr(node, name) for name in ("attempt", "metrics", "cache", "started")}
            record.state.nodes[node_id] = NodeState(**kept)
    pinned = {**record.state.pinned, **done}
    planner = make_planner(store, record.graph(), pinned, record.state.forced)
    require_met(planner)
    return _session(store, record, planner, record.plan())


def _resumed_with(store: Store, source: Record, overrides: Sequence[str]) -> Session:
    graph = override_graph(source.graph(), overrides)
    anew = {node_id for override in overrides for node_id in graph.below(_node_of(override))}
    done = {node_id: digest for node_id, digest in _done(store, source).items() if node_id not in anew}
    taken = {node_id: digest for node_id, digest in source.state.pinned.items() if node_id not in anew}
    forced = [node_id for node_id in source.state.forced if node_id not in done]
    planner = make_planner(store, graph, {**taken, **done}, forced)
    require_met(planner)
    record = Record.create(store.records, graph, pinned=taken, forced=forced, goes_on_from=source.run)
    record.state.nodes.update({node_id: _taken(source, node_id) for node_id in done})
    return _session(store, record, planner, source.plan())


@while_nothing_goes
def run_from(store: Store, run: str | None, node_id: str, overrides: Sequence[str]) -> Session:
    """A new record in which `node_id` and all below it run anew and all else is taken from an earlier run as it is.

    Raises PipelineError for an unknown node or an override above it, StoreError where an artifact is gone.
    """
    source = find_record(store.records, run)
    recorded = source.graph()
    if node_id not in recorded.nodes:
        hint = did_you_mean(node_id, list(recorded.nodes)) or f"nodes: {', '.join(recorded.nodes)}"
        raise PipelineError([Mistake(f'--from: run {source.run} has no node "{node_id}"', hint=hint)])
    graph = override_graph(recorded, overrides)
    anew = graph.below(node_id)
    outside = [override for override in overrides if _node_of(override) not in anew]
    if outside:
        hint = (
            f"a node that is not below --from is taken as it is; start from it, or use `dflow run` with -s {outside[0]}"
        )
        raise PipelineError([Mistake(f"-s {override}: not at or below {node_id}", hint=hint) for override in outside])
    pinned = {}
    states = {}
    for other, state in source.state.nodes.items():
        if other in anew:
            continue
        if state.digest is None:
            raise StoreError(
                f'node "{other}" was not finished in run {source.run}, so nothing can start below it; '
                f"finish it with `dflow resume {source.run}`"
            )
        pinned[other] = state.digest
        states[other] = _taken(source, other)
    planner = make_planner(store, graph, pinned, anew)
    require_met(planner)
    record = Record.create(store.records, graph, pinned=pinned, forced=sorted(anew))
    record.state.nodes.update(states)
    return _session(store, record, planner, source.plan())


def _done(store: Store, record: Record) -> dict[str, str]:
    """The digests of the nodes that the run finished and whose artifacts are still there."""
    states = record.state.nodes.items()
    digests = {node_id: node.digest for node_id, node in states if node.state == "done" and node.digest is not None}
    return {node_id: digest for node_id, digest in digests.items() if store.has(digest)}


def _taken(source: Record, node_id: str) -> NodeState:
    """A node of an earlier run in the record of a new one."""
    state = source.state.nodes[node_id]
    return NodeState(
        state="done",
        cache="hit",
        key=state.key,
        digest=state.digest,
        reason=f"taken from run {source.run} as it is",
        metrics=state.metrics,
        warnings=state.warnings,
        source_run=state.source_run or source.run,
    )


def _node_of(override: str) -> str:
    return override.partition(".")[0].strip()


def previous_nodes(records: Path, graph: Graph) -> dict[str, Previous]:
    """Each node in the newest record of the same pipeline that finished it, else in the newest that has it."""
    finished: dict[str, Previous] = {}
    present: dict[str, Previous] = {}
    for record in islice(newest_records(records, graph.name), RECORDS_SEARCHED):
        states = record.state.nodes
        for node_id, row in record.plan().items():
            if node_id not in graph.nodes or node_id in finished:
                continue
            inputs = {parent: digest for parent in row["parents"] if (digest := states[parent].digest) is not None}
            previous = Previous(row["parts"], inputs, states[node_id].digest)
            present.setdefault(node_id, previous)
            if previous.digest is not None:
                finished[node_id] = previous
        if len(finished) == len(graph.nodes):
            break
    return {**present, **finished}


def _session(store: Store, record: Record, planner: Planner, earlier: Mapping[str, Any] | None = None) -> Session:
    """Lock the record and write the plan. Of nodes taken as they are, the rows of the earlier plan stay true."""
    record.lock()
    decisions = planner.plan()
    for node_id, decision in decisions.items():
        node = record.state.nodes[node_id]
        if node.state != "done":
            node.key, node.reason = decision.key, decision.reason
    rows = {node_id: plan_row(planner, node_id, decisions[node_id]) for node_id in planner.parts}
    kept = {node_id: row for node_id, row in (earlier or {}).items() if node_id in planner.pinned}
    record.save_plan({**rows, **kept})
    record.state.status = "running"
    record.state.ended = None
    record.save_all()
    return Session(store, record, planner)


def plan_row(planner: Planner, node_id: str, decision: Decision) -> dict[str, Any]:
    """What plan.json says of a node."""
    return {
        "cache": decision.cache,
        "reason": decision.reason,
        "key": decision.key,
        "parents": list(planner.graph.nodes[node_id].parents),
        "parts": planner.parts[node_id].to_json(),
    }
