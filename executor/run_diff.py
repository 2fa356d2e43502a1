"""What differs between two runs of one store, node by node: values, code, inputs, artifacts and final metrics."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Literal

import attrs
from attrs import frozen

from executor.code_changes import CodeChange, code_changes
from executor.code_texts import kept_text
from executor.explain import ABSENT, ValueChange, value_changes
from executor.keys import differing
from executor.lines import finite
from executor.plan import Previous
from executor.previous import Earlier, previous_in
from executor.record import NodeState, Record
from executor.recorded_graph import written_nodes
from executor.store import Store

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
    compared, since the records and artifacts that tell of them are gone.
    """

    node: str
    where: Where
    digests: tuple[str | None, str | None]
    values: tuple[ValueChange, ...] = ()
    code: tuple[CodeChange, ...] = ()
    inputs: tuple[str, ...] = ()
    metrics: tuple[MetricPair, ...] = ()
    unknown: tuple[Where, ...] = ()

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
        }
        return {name: finite(value) for name, value in told.items()}


def compare_runs(store: Store, first: Record, second: Record) -> list[NodeDiff]:
    """All nodes of both, in the order of the second run; those that only the first has stand last."""
    sides = (_Side(store, first), _Side(store, second))
    names = dict.fromkeys([*second.state.nodes, *first.state.nodes])
    return [_node(store, node_id, *sides) for node_id in names]


class _Side:
    """What one record tells of its nodes, without the ops: they may be gone."""

    def __init__(self, store: Store, record: Record) -> None:
        self._store = store
        self._earlier = Earlier(record.state.nodes, record.plan())
        self.written = written_nodes(record.folder)
        self.nodes: Mapping[str, NodeState] = record.state.nodes

    def previous(self, node_id: str) -> Previous | None:
        return previous_in(self._store, self._earlier, node_id)

    def inputs(self, node_id: str) -> dict[str, str]:
        """The digests that are known of the nodes that it reads."""
        known = ((parent, self.nodes.get(parent)) for parent in self._earlier.rows.get(node_id, {}).get("parents", ()))
        return {parent: node.digest for parent, node in known if node is not None and node.digest is not None}

    def config(self, node_id: str) -> dict[str, Any]:
        """As it is written, with the nodes on the edges."""
        config = self.written.get(node_id, {}).get("config", {})
        return {name: _reference(value) for name, value in config.items()}

    def settings(self, node_id: str, keyed: Container[str]) -> dict[str, Any]:
        """The values outside the key, and which nodes stand on the edges."""
        config = {name: value for name, value in self.config(node_id).items() if name not in keyed}
        launch = self.written.get(node_id, {}).get("launch", {})
        return config | {f"launch.{name}": value for name, value in launch.items()}


def _node(store: Store, node_id: str, first: _Side, second: _Side) -> NodeDiff:
    one, other = first.nodes.get(node_id), second.nodes.get(node_id)
    if one is None:
        values = tuple(ValueChange("value", name, ABSENT, value) for name, value in second.config(node_id).items())
        return NodeDiff(node_id, "second", _digests(one, other), values, metrics=_metrics(one, other))
    if other is None:
        values = tuple(ValueChange("value", name, value, ABSENT) for name, value in first.config(node_id).items())
        return NodeDiff(node_id, "first", _digests(one, other), values, metrics=_metrics(one, other))
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


def _settings(kind: str, node_id: str, first: _Side, second: _Side, known: Container[str]) -> tuple[ValueChange, ...]:
    """Of the values that are not known by the key parts, those that differ."""
    old, new = first.settings(node_id, known), second.settings(node_id, known)
    return tuple(ValueChange(kind, name, old.get(name, ABSENT), new.get(name, ABSENT)) for name in differing(old, new))


def _digests(one: NodeState | None, other: NodeState | None) -> tuple[str | None, str | None]:
    return one.digest if one is not None else None, other.digest if other is not None else None


def _reference(value: Any) -> Any:
    """A reference to a node as it is written in a file."""
    if isinstance(value, dict) and value.keys() == {"ref"}:
        return f"@{value['ref']}"
    return [_reference(member) for member in value] if isinstance(value, list) else value


def _metrics(one: NodeState | None, other: NodeState | None) -> tuple[MetricPair, ...]:
    first, second = (node.metrics if node is not None else {} for node in (one, other))
    return tuple(MetricPair(name, first.get(name), second.get(name)) for name in sorted({*first, *second}))
