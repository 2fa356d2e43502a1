"""What differs between two runs of one store, node by node: values, code, inputs, artifacts and final metrics."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
from attrs import frozen

from dsl.convert import flat
from dsl.pipeline import Copy
from executor.keys.differences import (
    ABSENT,
    Difference,
    Kind,
    code_differences,
    difference_text,
    differences,
    value_differences,
    with_paths,
)
from executor.planning.history import Earlier, previous_in
from executor.planning.planner import Previous
from executor.records.graph_file import RecordedNode, recorded_nodes
from executor.records.run_record import NodeState, Record
from executor.results.sweep import by_combination
from executor.store.artifact_store import Store
from executor.system.output import columns, counted, finite, moment, shown_digest

Where = Literal["both", "first", "second"]
WIDTH = 100
MOST_COMBINATIONS = 16


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
    """The differences of one node between two runs.

    inputs: the nodes that it reads whose artifacts differ. digests: its own artifacts in both runs. values: the changed
    config; the whole config if only one run has the node. unknown: runs whose code and libraries were not compared, as
    their records and artifacts are gone. copy_of: the node of which it is a copy, if compared under its own id.
    """

    node: str
    where: Where
    digests: tuple[str | None, str | None]
    values: tuple[Difference, ...] = ()
    code: tuple[Difference, ...] = ()
    inputs: tuple[str, ...] = ()
    metrics: tuple[MetricPair, ...] = ()
    unknown: tuple[Where, ...] = ()
    copy_of: str = ""

    @property
    def is_same(self) -> bool:
        """Whether nothing differs except measured metrics."""
        found = self.values or self.code or self.inputs or self.unknown
        return self.where == "both" and None not in self.digests and len(set(self.digests)) == 1 and not found

    @property
    def status(self) -> str:
        """A short phrase for the table, such as "only in the first" or "not finished in the second"."""
        if self.where != "both":
            origin = f", a copy of {self.copy_of}" if self.copy_of else ""
            return f"only in the {self.where}{origin}"
        lacking = [name for name, digest in zip(("first", "second"), self.digests, strict=True) if digest is None]
        if lacking:
            return f"not finished in the {' and the '.join(lacking)}"
        if self.digests[0] != self.digests[1]:
            return "another artifact"
        return "the same" if self.is_same else "the same artifact"

    def to_json(self) -> dict[str, Any]:
        """The difference as JSON; infinite and NaN numbers become null. "same": whether both runs have the
        same metric.
        """
        metrics = [{**attrs.asdict(pair), "difference": pair.difference, "same": pair.is_same} for pair in self.metrics]
        found = {
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
        return {name: finite(value) for name, value in found.items()}


@frozen
class CombinationDiff:
    """The copies of one combination of a sweep, each compared with the node of the other run that it is a copy of."""

    values: Mapping[str, str]
    nodes: Sequence[NodeDiff]

    def to_json(self) -> dict[str, Any]:
        return {"values": dict(self.values), "nodes": [node.to_json() for node in self.nodes]}


@frozen
class RunsDiff:
    """The comparison of two runs.

    nodes: those compared under their own ids. swept: the run whose copies are compared with the other's nodes, if only
    one is a sweep. combinations: those comparisons.
    """

    nodes: Sequence[NodeDiff]
    combinations: Sequence[CombinationDiff] = ()
    swept: Where = "both"


def compare_runs(store: Store, first: Record, second: Record) -> RunsDiff:
    """Compare two runs node by node. If only one of them is a sweep, its copies are compared with the other's nodes."""
    one, other = Part.of(store, first), Part.of(store, second)
    if bool(one.copies) == bool(other.copies):
        return RunsDiff(_compared_nodes(one, other))
    swept, plain = (other, one) if other.copies else (one, other)

    def compared(of_plain: Part, of_swept: Part) -> list[NodeDiff]:
        return _compared_nodes(of_plain, of_swept) if swept is other else _compared_nodes(of_swept, of_plain)

    combinations = [
        CombinationDiff(values, compared(plain.only(part.ids), part)) for values, part in swept.combinations()
    ]
    copied = {*swept.copies, *(copy.template for copy in swept.copies.values())}
    rest = compared(plain.only(plain.ids.keys() - copied), swept.only(swept.ids.keys() - copied))
    return RunsDiff(rest, combinations, "second" if swept is other else "first")


def _compared_nodes(first: Part, second: Part) -> list[NodeDiff]:
    """The comparison of all nodes of both runs, in the order of the second; nodes that only the first has come last."""
    return [_node(name, first, second) for name in dict.fromkeys([*second.ids, *first.ids])]


@frozen
class Part:
    """The nodes of a run that are compared. ids: name used for the comparison -> the node's id in the run.

    recorded: the nodes as in the run's graph; their ops may no longer exist. copies: node id -> the node it is a copy
    of.
    """

    store: Store
    earlier: Earlier
    recorded: Mapping[str, RecordedNode]
    copies: Mapping[str, Copy]
    ids: Mapping[str, str]
    is_renamed: bool = False

    @classmethod
    def of(cls, store: Store, record: Record) -> Part:
        """All nodes of a run, each under its own id."""
        nodes, recorded = record.state.nodes, recorded_nodes(record.folder)
        copies = {node_id: copy for node_id in nodes if node_id in recorded and (copy := recorded[node_id].copy)}
        return cls(store, Earlier(nodes, record.plan()), recorded, copies, {node_id: node_id for node_id in nodes})

    def only(self, names: Container[str]) -> Part:
        return attrs.evolve(self, ids={name: own for name, own in self.ids.items() if name in names})

    def combinations(self) -> Iterator[tuple[dict[str, str], Part]]:
        """Each combination of a sweep: the chosen value by group, and its copies under the names of their templates."""
        chosen = {node_id: frozenset(copy.values.items()) for node_id, copy in self.copies.items()}
        for members in by_combination(chosen).values():
            values = {group: value for node_id in members for group, value in self.copies[node_id].values.items()}
            ids = {self.copies[node_id].template: node_id for node_id in members}
            yield values, attrs.evolve(self, ids=ids, is_renamed=True)

    def node(self, name: str) -> NodeState | None:
        return self.earlier.nodes[self.ids[name]] if name in self.ids else None

    def previous(self, name: str) -> Previous | None:
        return previous_in(self.store, self.earlier, self.ids[name])

    def shown(self, node_id: str) -> str:
        """The name of a node that is read; for a copy the name under which copies are compared."""
        return self.copies[node_id].template if self.is_renamed and node_id in self.copies else node_id

    def inputs(self, name: str) -> dict[str, str]:
        """The known digests of the artifacts that a node reads, by the nodes' names."""
        row = self.earlier.rows.get(self.ids[name])
        known = ((parent, self.earlier.nodes.get(parent)) for parent in (row.parents if row is not None else ()))
        return {self.shown(parent): node.digest for parent, node in known if node is not None and node.digest}

    def copy_of(self, name: str) -> str:
        copy = self.copies.get(self.ids[name])
        return copy.template if copy is not None and copy.template != name else ""

    def config(self, name: str) -> dict[str, Any]:
        """The config as recorded, with the nodes on the edges; the values in tables by "table.key"."""
        return {field: self._reference(value) for field, value in flat(self._recorded(name).config).items()}

    def settings(self, name: str, keyed: Container[str]) -> dict[str, Any]:
        """The values of a node that do not enter its key, and the nodes on its edges. keyed: names that
        enter the key.
        """
        config = {field: value for field, value in self.config(name).items() if field not in keyed}
        return config | {f"launch.{field}": value for field, value in self._recorded(name).launch.items()}

    def _recorded(self, name: str) -> RecordedNode:
        return self.recorded.get(self.ids[name], RecordedNode())

    def _reference(self, value: Any) -> Any:
        """A config value in which a reference to a copied node names the node under which the copy is compared."""
        if isinstance(value, str) and value.startswith("@"):
            return f"@{self.shown(value[1:])}"
        return [self._reference(member) for member in value] if isinstance(value, list) else value


def _node(name: str, first: Part, second: Part) -> NodeDiff:
    one, other = first.node(name), second.node(name)
    digests = (one.digest if one is not None else None, other.digest if other is not None else None)
    diff = NodeDiff(name, "both", digests, metrics=_metrics(one, other))
    if one is None:
        values = [Difference("value", field, ABSENT, value) for field, value in second.config(name).items()]
        return attrs.evolve(diff, where="second", values=tuple(values), copy_of=second.copy_of(name))
    if other is None:
        values = [Difference("value", field, value, ABSENT) for field, value in first.config(name).items()]
        return attrs.evolve(diff, where="first", values=tuple(values), copy_of=first.copy_of(name))
    old, new = first.inputs(name), second.inputs(name)
    inputs = tuple(parent for parent, digest in new.items() if old.get(parent, digest) != digest)
    before, after = first.previous(name), second.previous(name)
    if before is None or after is None:
        sides: tuple[tuple[Where, Previous | None], ...] = (("first", before), ("second", after))
        unknown = tuple(which for which, previous in sides if previous is None)
        return attrs.evolve(diff, inputs=inputs, values=_settings("value", name, first, second, ()), unknown=unknown)
    keyed = {field for each in (before.parts, after.parts) for field in (*flat(each.config), *each.external)}
    found = with_paths(differences(before.parts, after.parts), second.config(name), first.config(name))
    values = [each for each in found if each.kind != "code"]
    code = code_differences(before.parts.code, after.parts.code)
    values += _settings("setting", name, first, second, keyed)
    return attrs.evolve(diff, inputs=inputs, values=tuple(values), code=tuple(code))


def _settings(kind: Kind, name: str, first: Part, second: Part, keyed: Container[str]) -> tuple[Difference, ...]:
    """The differences in values that do not enter the key."""
    return tuple(value_differences(kind, first.settings(name, keyed), second.settings(name, keyed)))


def _metrics(one: NodeState | None, other: NodeState | None) -> tuple[MetricPair, ...]:
    first, second = (node.metrics if node is not None else {} for node in (one, other))
    return tuple(MetricPair(name, first.get(name), second.get(name)) for name in sorted({*first, *second}))


def runs_text(first: Record, second: Record, found: RunsDiff) -> str:
    """The comparison as text: the two runs, a table of their nodes, then the differences of each node and metric.

    If one run is a sweep, the same follows for each of its first combinations.
    """
    runs = [("first", first), ("second", second)]
    heads = [
        (word, record.run, record.state.pipeline, moment(record.state.started), record.status())
        for word, record in runs
    ]
    blocks = [columns(heads[0], heads[1:])]
    if not found.combinations:
        return "\n\n".join([*blocks, *_compared(found.nodes, "Every node")])
    blocks.append(_swept(found))
    if found.nodes:
        blocks += _compared(found.nodes, "Every node that is not swept")
    for combination in found.combinations[:MOST_COMBINATIONS]:
        name = ", ".join(f"{group}={value}" for group, value in combination.values.items())
        blocks += [f"--- {name} ---", *_compared(combination.nodes, "Every node of this combination")]
    left = len(found.combinations) - MOST_COMBINATIONS
    return "\n\n".join([*blocks, *([f"and {left} more combinations: dflow diff --json"] if left > 0 else [])])


def _swept(found: RunsDiff) -> str:
    """A sentence on the number of combinations in a sweep, and the values that they combine."""
    other = "first" if found.swept == "second" else "second"
    values: dict[str, dict[str, None]] = {}
    for combination in found.combinations:
        for group, value in combination.values.items():
            values.setdefault(group, {})[value] = None
    lines = "\n".join(f"  {group}: {', '.join(each)}" for group, each in values.items())
    count = counted(len(found.combinations), "combination")
    head = f"The {found.swept} is a sweep of {count}; each copy of a node is compared with that node of the {other}:"
    return f"{head}\n{lines}"


def _compared(nodes: Sequence[NodeDiff], every: str) -> list[str]:
    blocks = []
    if all(node.is_same for node in nodes):
        blocks.append(f"{every} has the same key parts, settings and artifact in both.")
    else:
        blocks.append(columns(("node", "first", "second", ""), list(map(_row, nodes))))
        blocks += ["\n".join(lines) for node in nodes if len(lines := _details(node)) > 1]
    pairs = [(node.node, pair) for node in nodes for pair in node.metrics if not pair.is_same]
    rows = [(node, pair.name, _number(pair.first), _number(pair.second), _difference(pair)) for node, pair in pairs]
    if rows:
        blocks.append(columns(("node", "metric", "first", "second", "difference"), rows))
    same = sum(pair.is_same for node in nodes for pair in node.metrics)
    if same:
        blocks.append(f"{same} final metrics are the same in both.")
    return blocks


def _row(node: NodeDiff) -> tuple[str, ...]:
    return (node.node, *(shown_digest(digest) or "-" for digest in node.digests), node.status)


def _details(node: NodeDiff) -> list[str]:
    if node.where != "both":
        return [f"{node.node}:", *_config(node)]
    lines = [f"  {difference_text(node.node, each)}" for each in (*node.values, *node.code)]
    lines += [f"  input changed: {parent} is another artifact" for parent in node.inputs]
    if node.unknown:
        gone = " and the ".join(node.unknown)
        lines.append(f"  code and libraries: not compared, their record is gone for the {gone}")
    return [f"{node.node}:", *lines]


def _config(node: NodeDiff) -> list[str]:
    """The values of a node that only one run has, as lines with several each; None values are left out."""
    values = [(change.name, change.new if node.where == "second" else change.old) for change in node.values]
    text = ", ".join(f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in values if value is not None)
    head = f"  {node.status}: "
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent="    ", break_long_words=False)


def _difference(pair: MetricPair) -> str:
    if pair.difference is None:
        return ""
    share = f" ({pair.difference / abs(pair.first):+.2%})" if pair.first else ""
    return f"{pair.difference:+.4g}{share}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
