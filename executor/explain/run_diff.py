"""What differs between two runs of one store, node by node: values, code, inputs, artifacts and final metrics."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal

import attrs
from attrs import frozen

from executor.explain.reasons import ABSENT, ValueChange, value_changes
from executor.explain.run_parts import Part, combination_parts, templates_of, whole
from executor.keys.code_archive import kept_text
from executor.keys.code_diff import CodeChange, code_changes
from executor.keys.node_key import differing
from executor.planning.history import Earlier, previous_in
from executor.planning.planner import Previous
from executor.records.graph_file import written_nodes
from executor.records.run_record import NodeState, Record
from executor.store.artifact_store import Store
from executor.system.output import finite

Where = Literal["both", "first", "second"]


@frozen
class MetricPair:
    """A final metric in both runs; None where a run lacks it."""

    name: str
    first: float | None
    second: float | None

    @property
    def difference(self) -> float | None:
        return None if self.first is None or self.second is None else self.second - self.first

    @property
    def is_same(self) -> bool:
        both_nan = self.first != self.first and self.second != self.second
        return both_nan or self.first == self.second


@frozen
class NodeDiff:
    """One node. inputs: the producers whose artifacts are not the same. digests: those of the first and the second.

    values: of a node that only one run has, all of its config. unknown: the runs whose code and libraries are not
    compared, since the records and artifacts that tell of them are gone. copy_of: what it is a copy of, where it is
    compared under its own id.
    """

    node: str
    where: Where
    digests: tuple[str | None, str | None]
    values: tuple[ValueChange, ...] = ()
    code: tuple[CodeChange, ...] = ()
    inputs: tuple[str, ...] = ()
    metrics: tuple[MetricPair, ...] = ()
    unknown: tuple[Where, ...] = ()
    copy_of: str = ""

    @property
    def is_same(self) -> bool:
        """Whether nothing but measured figures differs."""
        told = self.values or self.code or self.inputs or self.unknown
        return self.where == "both" and None not in self.digests and len(set(self.digests)) == 1 and not told

    def to_json(self) -> dict[str, Any]:
        """null for what is not finite, since JSON has no such number; "same" tells whether a metric is."""
        metrics = [{**attrs.asdict(pair), "difference": pair.difference, "same": pair.is_same} for pair in self.metrics]
        told = {
            "node": self.node,
            "in": self.where,
            "digests": list(self.digests),
            "changes": [change.to_json() for change in self.values],
            "code": [change.to_json() for change in self.code],
            "inputs": list(self.inputs),
            "metrics": metrics,
            "unknown": list(self.unknown),
            "copy_of": self.copy_of or None,
        }
        return {name: finite(value) for name, value in told.items()}


@frozen
class CombinationDiff:
    """The copies of a combination, each against the node of the other run that it is a copy of."""

    values: Mapping[str, str]
    nodes: Sequence[NodeDiff]

    def to_json(self) -> dict[str, Any]:
        return {"values": dict(self.values), "nodes": [node.to_json() for node in self.nodes]}


@frozen
class RunsDiff:
    """Two runs. swept: the one whose copies are compared with nodes of the other, combination by combination.

    nodes: those that are compared under their own ids.
    """

    nodes: Sequence[NodeDiff]
    combinations: Sequence[CombinationDiff] = ()
    swept: Where = "both"


def compare_with_copies(store: Store, first: Record, second: Record) -> RunsDiff:
    """Where one of them alone has copies, each is compared with what it is a copy of; else ids with the same ids."""
    parts = (combination_parts(first), combination_parts(second))
    if all(parts) or not any(parts):
        return RunsDiff(compare_runs(store, first, second))
    is_second = bool(parts[1])
    copies = templates_of(second if is_second else first)
    names = {*copies, *copies.values()}
    plain, swept = whole(first if is_second else second), whole(second if is_second else first)

    def compared(plain: Part, swept: Part) -> list[NodeDiff]:
        return compare_parts(store, *((plain, swept) if is_second else (swept, plain)))

    found = [CombinationDiff(part.values, compared(plain.only(part.nodes), part)) for part in parts[0] or parts[1]]
    return RunsDiff(compared(plain.without(names), swept.without(names)), found, "second" if is_second else "first")


def compare_runs(store: Store, first: Record, second: Record) -> list[NodeDiff]:
    """All nodes of both by their ids, see `compare_parts`."""
    return compare_parts(store, whole(first), whole(second))


def compare_parts(store: Store, first: Part, second: Part) -> list[NodeDiff]:
    """All nodes of both, in the order of the second; those that only the first has stand last."""
    sides = (_Side(store, first), _Side(store, second))
    names = dict.fromkeys([*second.nodes, *first.nodes])
    return [_node(store, node_id, *sides) for node_id in names]


class _Side:
    """What one record tells of its nodes, by the names under which they are compared. The ops may be gone."""

    def __init__(self, store: Store, part: Part) -> None:
        self._store = store
        self._ids = part.nodes
        self._earlier = Earlier(part.record.state.nodes, part.record.plan())
        written = written_nodes(part.record.folder)
        self.written = {name: written.get(own, {}) for name, own in part.nodes.items()}
        self.nodes: Mapping[str, NodeState] = {name: part.record.state.nodes[own] for name, own in part.nodes.items()}
        self._templates = templates_of(part.record)
        is_renamed = any(name != own for name, own in part.nodes.items())
        self._shown = self._templates if is_renamed else {}

    def previous(self, name: str) -> Previous | None:
        return previous_in(self._store, self._earlier, self._ids[name])

    def inputs(self, name: str) -> dict[str, str]:
        """The digests that are known of the nodes that it reads."""
        parents = self._earlier.rows.get(self._ids[name], {}).get("parents", ())
        known = ((self._shown.get(parent, parent), self._earlier.nodes.get(parent)) for parent in parents)
        return {parent: node.digest for parent, node in known if node is not None and node.digest is not None}

    def copy_of(self, name: str) -> str:
        template = self._templates.get(self._ids[name], "")
        return template if template != name else ""

    def config(self, node_id: str) -> dict[str, Any]:
        """As it is written, with the nodes on the edges."""
        config = self.written.get(node_id, {}).get("config", {})
        return {name: _reference(value, self._shown) for name, value in config.items()}

    def settings(self, node_id: str, keyed: Container[str]) -> dict[str, Any]:
        """The values outside the key, and which nodes stand on the edges."""
        config = {name: value for name, value in self.config(node_id).items() if name not in keyed}
        launch = self.written.get(node_id, {}).get("launch", {})
        return config | {f"launch.{name}": value for name, value in launch.items()}


def _node(store: Store, node_id: str, first: _Side, second: _Side) -> NodeDiff:
    one, other = first.nodes.get(node_id), second.nodes.get(node_id)
    if one is None:
        values = tuple(ValueChange("value", name, ABSENT, value) for name, value in second.config(node_id).items())
        return _alone(node_id, "second", second.copy_of(node_id), one, other, values)
    if other is None:
        values = tuple(ValueChange("value", name, value, ABSENT) for name, value in first.config(node_id).items())
        return _alone(node_id, "first", first.copy_of(node_id), one, other, values)
    old, new = first.inputs(node_id), second.inputs(node_id)
    diff = NodeDiff(
        node_id,
        "both",
        _digests(one, other),
        inputs=tuple(parent for parent, digest in new.items() if old.get(parent, digest) != digest),
        metrics=_metrics(one, other),
    )
    before, after = first.previous(node_id), second.previous(node_id)
    if before is None or after is None:
        sides: tuple[tuple[Where, Previous | None], ...] = (("first", before), ("second", after))
        unknown = tuple(which for which, previous in sides if previous is None)
        return attrs.evolve(diff, values=_settings("value", node_id, first, second, ()), unknown=unknown)
    parts = (before.parts, after.parts)
    known = {name for each in parts for kind in ("config", "external") for name in each[kind]}
    values = (*value_changes(*parts), *_settings("setting", node_id, first, second, known))
    code = code_changes(before.parts["code"], after.parts["code"], lambda place, hash: kept_text(store.path, hash))
    return attrs.evolve(diff, values=values, code=tuple(code))


def _alone(
    node_id: str,
    where: Where,
    copy_of: str,
    one: NodeState | None,
    other: NodeState | None,
    values: tuple[ValueChange, ...],
) -> NodeDiff:
    return NodeDiff(node_id, where, _digests(one, other), values, metrics=_metrics(one, other), copy_of=copy_of)


def _settings(kind: str, node_id: str, first: _Side, second: _Side, known: Container[str]) -> tuple[ValueChange, ...]:
    """Of the values that are not known by the key parts, those that differ."""
    old, new = first.settings(node_id, known), second.settings(node_id, known)
    return tuple(ValueChange(kind, name, old.get(name, ABSENT), new.get(name, ABSENT)) for name in differing(old, new))


def _digests(one: NodeState | None, other: NodeState | None) -> tuple[str | None, str | None]:
    return one.digest if one is not None else None, other.digest if other is not None else None


def _reference(value: Any, shown: Mapping[str, str]) -> Any:
    """A reference to a node as it is written in a file, one to a copy by the name under which that is compared."""
    if isinstance(value, dict) and value.keys() == {"ref"}:
        return f"@{shown.get(value['ref'], value['ref'])}"
    return [_reference(member, shown) for member in value] if isinstance(value, list) else value


def _metrics(one: NodeState | None, other: NodeState | None) -> tuple[MetricPair, ...]:
    first, second = (node.metrics if node is not None else {} for node in (one, other))
    return tuple(MetricPair(name, first.get(name), second.get(name)) for name in sorted({*first, *second}))
