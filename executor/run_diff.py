"""What differs between two runs of one store, node by node: values, code, inputs, artifacts and final metrics."""

from __future__ import annotations

from collections.abc import Mapping
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
    """One node. inputs: the producers whose artifacts are not the same. digests: those of the first and the second."""

    node: str
    where: Where
    digests: tuple[str | None, str | None]
    values: tuple[ValueChange, ...] = ()
    code: tuple[CodeChange, ...] = ()
    inputs: tuple[str, ...] = ()
    metrics: tuple[MetricPair, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether nothing but measured figures differs."""
        told = self.values or self.code or self.inputs
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

    def settings(self, node_id: str, keyed: Mapping[str, Any]) -> dict[str, Any]:
        """The values outside the key, and which nodes stand on the edges."""
        written = self.written.get(node_id, {})
        config = {name: value for name, value in written.get("config", {}).items() if name not in keyed}
        launch = {f"launch.{name}": value for name, value in written.get("launch", {}).items()}
        return {name: _reference(value) for name, value in config.items()} | launch


def _node(store: Store, node_id: str, first: _Side, second: _Side) -> NodeDiff:
    if node_id not in first.nodes:
        return NodeDiff(node_id, "second", (None, second.nodes[node_id].digest))
    if node_id not in second.nodes:
        return NodeDiff(node_id, "first", (first.nodes[node_id].digest, None))
    one, other = first.nodes[node_id], second.nodes[node_id]
    diff = NodeDiff(node_id, "both", (one.digest, other.digest), metrics=_metrics(one, other))
    before, after = first.previous(node_id), second.previous(node_id)
    keyed = [*(before.parts["config"] if before else ()), *(after.parts["config"] if after else ())]
    external = [*(before.parts["external"] if before else ()), *(after.parts["external"] if after else ())]
    known = dict.fromkeys([*keyed, *external])
    settings = differing(old := first.settings(node_id, known), new := second.settings(node_id, known))
    kind = "value" if before is None or after is None else "setting"
    values = [ValueChange(kind, name, old.get(name, ABSENT), new.get(name, ABSENT)) for name in settings]
    if before is None or after is None:
        return attrs.evolve(diff, values=tuple(values))
    code = code_changes(before.parts["code"], after.parts["code"], lambda place, hash: kept_text(store.path, hash))
    inputs = [
        parent for parent, digest in after.input_digests.items() if before.input_digests.get(parent, digest) != digest
    ]
    return attrs.evolve(
        diff, values=(*value_changes(before.parts, after.parts), *values), code=tuple(code), inputs=tuple(inputs)
    )


def _reference(value: Any) -> Any:
    """A reference to a node as it is written in a file."""
    if isinstance(value, dict) and value.keys() == {"ref"}:
        return f"@{value['ref']}"
    return [_reference(member) for member in value] if isinstance(value, list) else value


def _metrics(one: NodeState, other: NodeState) -> tuple[MetricPair, ...]:
    names = sorted({*one.metrics, *other.metrics})
    return tuple(MetricPair(name, one.metrics.get(name), other.metrics.get(name)) for name in names)
