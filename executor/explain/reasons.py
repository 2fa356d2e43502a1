"""Why a node runs, and what lies behind it upwards to the first cause; or where a cached node's artifact came from."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs import frozen

from dsl.graph import Graph, GraphNode
from executor.keys.code_archive import kept_text, texts_now
from executor.keys.code_diff import CodeChange, code_changes
from executor.keys.node_key import differing
from executor.planning.planner import Cache, Decision, Planner, Previous
from executor.records.run_record import Record, load_begun, mlflow_ids
from executor.store.artifact_store import IndexLine, Store

ABSENT = object()
InputState = Literal["runs", "may change", "changed", "added", "removed"]


@frozen
class ValueChange:
    """A value that enters the key: kind "op", "config", "content" or "library"; "setting" for one that does not,
    or names the nodes on an edge; "value" where it is not known which of both it is.

    ABSENT where there is or was none. path: the file or folder whose content changed.
    """

    kind: str
    name: str
    old: Any
    new: Any
    path: str = ""

    def to_json(self) -> dict[str, Any]:
        values = {"old": self.old, "new": self.new}
        head = {"kind": self.kind, "name": self.name} | ({"path": self.path} if self.path else {})
        return head | {name: value for name, value in values.items() if value is not ABSENT}


@frozen
class InputChange:
    """A node that this one reads or read; old and new digests where they are known, and why it is another one."""

    producer: str
    state: InputState
    old: str | None = None
    new: str | None = None
    run: str | None = None
    cause: str = ""


@frozen
class Made:
    """Where a cached artifact came from. cause: why the node ran then; source: the URL from which it was pulled."""

    run: str
    time: float
    acceptance: str
    reason: str
    user: str
    accepted_key: str
    mlflow_run_id: str | None
    cause: str
    source: str = ""


@frozen
class Explanation:
    """All that is to be said of one node. said: the plan's own words, for what no change accounts for.

    against: the run with which the node was compared, where that is not the latest.
    """

    node: str
    op: str
    cache: Cache
    key: str | None
    digest: str | None
    said: str
    values: tuple[ValueChange, ...] = ()
    code: tuple[CodeChange, ...] = ()
    inputs: tuple[InputChange, ...] = ()
    made: Made | None = None
    against: str = ""

    def to_json(self) -> dict[str, Any]:
        made = None if self.made is None else attrs.asdict(self.made)
        return {
            "node": self.node,
            "op": self.op,
            "cache": self.cache,
            "key": self.key,
            "digest": self.digest,
            "reason": self.said,
            "changes": [change.to_json() for change in self.values],
            "code": [change.to_json() for change in self.code],
            "inputs": [attrs.asdict(change) for change in self.inputs],
            "against": self.against,
            "made": made,
        }


def explain(store: Store, planner: Planner, node_id: str) -> list[Explanation]:
    """The node first, then each node above it that will or may run, the nearest first."""
    decisions = planner.plan()
    found: list[Explanation] = []
    seen = {node_id}
    pending = deque([node_id])
    while pending:
        node = planner.graph.nodes[pending.popleft()]
        found.append(_explained(store, planner, node, decisions))
        above = [parent for parent in node.parents if parent not in seen and decisions[parent].cache != "hit"]
        seen |= set(above)
        pending += above
    return found


def made_by(store: Store, line: IndexLine, key: str) -> Made:
    """What is known of the run that computed an artifact."""
    mlflow, cause = None, ""
    record = load_begun(store.records / line.run)
    if record is not None:
        maker = maker_of(record, line, key)
        if maker is not None:
            mlflow = mlflow_ids(store.records, record)["nodes"].get(maker)
            cause = record.state.nodes[maker].reason
    return Made(
        line.run, line.time, line.acceptance, line.reason, line.user, line.accepted_key, mlflow, cause, line.source
    )


def maker_of(record: Record, line: IndexLine, key: str) -> str | None:
    """The node of a run that computed what an index line of this key names."""
    makers = [node_id for node_id, node in record.state.nodes.items() if node.digest == line.digest]
    keys = (key, line.accepted_key)
    by_key = [node_id for node_id in makers if record.state.nodes[node_id].key in keys]
    return next(iter([*by_key, *makers]), None)


def value_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[ValueChange, ...]:
    """What differs between two nodes' parts in JSON form, code left out."""
    changes = [ValueChange("op", name, old[name], new[name]) for name in ("op", "version") if old[name] != new[name]]
    for kind, part in (("config", "config"), ("content", "external"), ("library", "libraries")):
        for name in differing(old[part], new[part]):
            changes.append(ValueChange(kind, name, old[part].get(name, ABSENT), new[part].get(name, ABSENT)))
    return tuple(changes)


def changed_code(store: Store, graph: Graph, node_id: str, old: Mapping[str, str]) -> tuple[CodeChange, ...]:
    """From old hashes to the code of the node as it is now."""
    now = texts_now(graph, node_id)

    def text_of(place: str, hash: str) -> str | None:
        if place in now and now[place][0] == hash:
            return now[place][1]
        return kept_text(store.path, hash)

    return tuple(code_changes(old, {place: hash for place, (hash, _text) in now.items()}, text_of))


def _explained(store: Store, planner: Planner, node: GraphNode, decisions: Mapping[str, Decision]) -> Explanation:
    decision = decisions[node.id]
    whole = Explanation(node.id, node.op.name, decision.cache, decision.key, decision.digest, decision.reason)
    if decision.cache == "hit":
        line = store.newest(decision.key) if decision.key is not None else None
        made = made_by(store, line, decision.key) if line is not None and decision.key is not None else None
        return attrs.evolve(whole, made=made)
    digests = {parent: digest for parent in node.parents if (digest := decisions[parent].digest) is not None}
    previous = planner.compared_with(node, digests)
    if previous is None:
        return attrs.evolve(whole, inputs=tuple(_waits(node, decisions)))
    parts = planner.parts[node.id].to_json()
    code = changed_code(store, planner.graph, node.id, previous.parts["code"])
    return attrs.evolve(
        whole,
        against=previous.run if previous != planner.previous.get(node.id) else "",
        values=tuple(_with_path(change, node) for change in value_changes(previous.parts, parts)),
        code=code if parts["code"] != previous.parts["code"] else (),
        inputs=tuple(_inputs(store, node, decisions, previous)),
    )


def _with_path(change: ValueChange, node: GraphNode) -> ValueChange:
    is_path = change.kind == "content" and change.name in node.op.fields
    return attrs.evolve(change, path=str(getattr(node.config, change.name))) if is_path else change


def _waits(node: GraphNode, decisions: Mapping[str, Decision]) -> list[InputChange]:
    """The inputs of a new node that are not there yet."""
    waited = [parent for parent in node.parents if decisions[parent].cache != "hit"]
    return [_awaited(parent, decisions[parent], None) for parent in waited]


def _awaited(parent: str, decision: Decision, before: str | None) -> InputChange:
    return InputChange(
        parent, "runs" if decision.cache == "miss" else "may change", before, None, None, decision.reason
    )


def _inputs(store: Store, node: GraphNode, decisions: Mapping[str, Decision], previous: Previous) -> list[InputChange]:
    changes = []
    for parent in node.parents:
        decision, before = decisions[parent], previous.input_digests.get(parent)
        if decision.cache != "hit":
            changes.append(_awaited(parent, decision, before))
        elif decision.digest != before:
            line = store.newest(decision.key) if decision.key is not None else None
            made = made_by(store, line, decision.key) if line is not None and decision.key is not None else None
            state: InputState = "changed" if before is not None else "added"
            run, cause = (made.run, made.cause) if made is not None else (None, "")
            changes.append(InputChange(parent, state, before, decision.digest, run, cause))
    gone = [parent for parent in previous.input_digests if parent not in node.parents]
    return changes + [InputChange(parent, "removed", previous.input_digests[parent]) for parent in gone]
