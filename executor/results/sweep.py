"""Sweeps and groups of for_each: the combinations that a user compares, the metric that sorts them, and their table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
from attrs import define, field, frozen

from dsl.convert import flat, unstructure
from dsl.errors import did_you_mean, listed
from dsl.graph import Graph, GraphNode
from dsl.launch import Launch
from dsl.shown import toml_text
from executor.records.run_record import NodeState
from executor.results.run_table import is_judged, is_main, result_rows
from executor.system.output import columns, counted

MISSPELT = 0.85  # as alike as a name with a letter too much; eval/tau and eval/tau_text are less
MOST_NAMES = 400  # characters
MOST_METRICS = 6

Choice = frozenset[tuple[str, str]]  # by group, the variant
CombinationsTable = tuple[tuple[str, ...], list[tuple[str, ...]], int]  # header, rows, the number of other metrics


@define
class Combination:
    """A combination of a sweep: one variant chosen in every group. values: group (a sweep's field) -> chosen value.

    name: unique, such as `lr=0.001, block_size=8`; a field's node is added where two nodes have such a field. nodes:
    its copies, in the order of the graph. own: those copies that belong to no other combination.
    """

    name: str = ""
    values: dict[str, str] = field(factory=dict)
    nodes: list[GraphNode] = field(factory=list)
    own: set[str] = field(factory=set)

    def result_nodes(self, graph: Graph) -> list[GraphNode]:
        results = set(graph.result_nodes)
        return [node for node in self.nodes if node.id in results]


def combinations(graph: Graph) -> list[Combination]:
    """The combinations of a graph in the order of the variants; none where nothing was copied.

    Nodes that were copied by only some of the groups belong to every combination with their variants.
    """
    chosen = {node.id: frozenset(node.copy.values.items()) for node in graph.nodes.values() if node.copy is not None}
    grouped = by_combination(chosen)
    uses = Counter(node_id for members in grouped.values() for node_id in members)
    found = []
    for members in grouped.values():
        own = {node_id for node_id in members if uses[node_id] == 1}
        found.append(Combination(nodes=[graph.nodes[node_id] for node_id in members], own=own))
    _name(found)
    return found


def by_combination(chosen: Mapping[str, Choice]) -> dict[Choice, list[str]]:
    """The copies that belong to each whole combination. chosen: copy -> its variants, maybe only a part of one."""
    distinct = list(dict.fromkeys(chosen.values()))
    largest = max(map(len, distinct), default=0)
    whole = [one for one in distinct if len(one) == largest or not any(one < other for other in distinct)]
    return {one: [node_id for node_id, part in chosen.items() if part <= one] for one in whole}


def _name(found: Iterable[Combination]) -> None:
    """Name combinations by the current values of their nodes.

    `resume -s` may have changed a copy's value, even to that of another copy.
    """
    chosen = [_chosen(combination.nodes) for combination in found]
    groups = dict.fromkeys(group for each in chosen for group in each)
    ends = Counter(_end(group) for group in groups)
    labels = {group: _end(group) if ends[_end(group)] == 1 else group for group in groups}
    for combination, each in zip(found, chosen, strict=True):
        combination.values = each | _given(combination.nodes, each)
        combination.name = _joined(labels, combination.values)
    uses = Counter(combination.name for combination in found)
    for combination, each in zip(found, chosen, strict=True):
        if uses[combination.name] > 1:
            combination.name += f" (was {_joined(labels, each)})"


def _chosen(nodes: Iterable[GraphNode]) -> dict[str, str]:
    """The variant chosen in each group by the copies of a combination."""
    chosen: dict[str, str] = {}
    for node in nodes:
        chosen |= node.copy.values if node.copy is not None else {}
    return chosen


def _given(nodes: Iterable[GraphNode], groups: Iterable[str]) -> dict[str, str]:
    """The current values of the swept fields in a combination's nodes."""
    found = {}
    for node in nodes:
        own = values(node) if node.copy is not None else {}
        for group in groups:
            template, _, name = group.partition(".")
            if node.copy is not None and template == node.copy.template and name in own:
                found[group] = toml_text(own[name])
    return found


def _end(group: str) -> str:
    return group.rpartition(".")[2]


def _joined(labels: Mapping[str, str], chosen: Mapping[str, str]) -> str:
    return ", ".join(f"{labels[group]}={value}" for group, value in chosen.items())


def params(node: GraphNode, *, edges: bool = True) -> dict[str, str]:
    """The parameters of a node, see `values`, as TOML texts; strings have no quotes."""
    return {
        name: value if isinstance(value, str) else toml_text(value) for name, value in values(node, edges=edges).items()
    }


def values(node: GraphNode, *, edges: bool = True) -> dict[str, Any]:
    """The config values of a node, tables as "table.key", and launch values that differ from defaults.

    edges: include the nodes that are read.
    """
    names = [*(node.op.edges if edges else ()), *node.op.fields]
    config = {name: getattr(node.config, name) for name in names}
    given = {name: value for name, value in config.items() if value is not None or name in node.op.fields}
    usual = Launch()
    launch = {field.name: getattr(node.launch, field.name) for field in attrs.fields(Launch)}
    changed = {f"launch.{name}": value for name, value in launch.items() if value != getattr(usual, name)}
    return {"op": node.op.name, **flat(unstructure(given)), **changed}


def differing_params(found: Iterable[Combination]) -> list[dict[str, str]]:
    """The parameters of each combination, as node.field, that are not equal in all combinations."""
    flat = [
        {f"{shown_id(node)}.{name}": value for node in each.nodes for name, value in params(node, edges=False).items()}
        for each in found
    ]
    names = dict.fromkeys(name for each in flat for name in each)
    differing = [name for name in names if len({each.get(name) for each in flat}) > 1]
    return [{name: each[name] for name in differing if name in each} for each in flat]


def final_metrics(nodes: Iterable[GraphNode], states: Mapping[str, NodeState]) -> dict[str, tuple[str, float]]:
    """The final metrics of finished nodes: displayed name -> (node id, value).

    A node's id becomes the prefix where several nodes share a metric or an op: `eval_long/eval/tau`. It does so even
    while the other node is not done.
    """
    listed = list(nodes)
    ops = Counter(node.op.name for node in listed)
    owners: dict[str, list[GraphNode]] = {}
    for node in listed:
        for name in states[node.id].metrics if states[node.id].state == "done" else ():
            owners.setdefault(name, []).append(node)
    found = {}
    for name, owning in owners.items():
        for node in owning:
            is_alone = len(owning) == 1 and ops[node.op.name] == 1
            found[name if is_alone else f"{shown_id(node)}/{name}"] = (node.id, states[node.id].metrics[name])
    return found


def shown_id(node: GraphNode) -> str:
    """The id of a node, which all its copies share."""
    return node.id if node.copy is None else node.copy.template


@frozen
class Row:
    """A combination of a sweep with its final metrics. state: "" where all of its nodes are done.

    main: the names of the metrics that are shown first.
    """

    combination: Combination
    metrics: Mapping[str, float]
    state: str
    main: frozenset[str] = frozenset()


def sweep_table(graph: Graph, states: Mapping[str, NodeState]) -> str:
    """The combinations of a sweep as a text table, the best first; empty for a graph that is no sweep."""
    found = combinations(graph)
    if not found:
        return ""
    rows, sort_by = sorted_rows(graph, states, found)
    header, table, left_out = sweep_cells(graph, rows, sort_by, has_state=any(row.state for row in rows))
    names = {name for row in rows for name in row.metrics}
    order = f", by {sort_by}" if sort_by in names else ""
    lines = [f"results of {counted(len(rows), 'combination')}{order}", columns(header, table)]
    if left_out:
        lines.append(f"and {left_out} more metrics: dflow ui, dflow status --json")
    return "\n".join([*lines, *filter(None, [sort_note(graph, names)])])


def sweep_cells(graph: Graph, rows: Sequence[Row], sort_by: str, *, has_state: bool) -> CombinationsTable:
    """The table of a sweep: the header, a row for each combination, and the number of metrics that are not shown.

    A row holds the swept values, the state, and the first metrics with their intervals.
    """
    groups = list(dict.fromkeys(group for row in rows for group in row.combination.values))
    shown = [
        {name: f"{value} {interval}".rstrip() for name, value, interval in result_rows(row.metrics, graph.judged_by)}
        for row in rows
    ]
    metrics = ordered_metrics(rows, (name for cells in shown for name in cells), sort_by)
    first = metrics[:MOST_METRICS]
    table = [
        (
            *(row.combination.values.get(group, "") for group in groups),
            *([row.state or "done"] if has_state else []),
            *(cells.get(name, "-") for name in first),
        )
        for row, cells in zip(rows, shown, strict=True)
    ]
    return (*groups, *(["state"] if has_state else []), *first), table, len(metrics) - len(first)


def ordered_metrics(rows: Iterable[Row], names: Iterable[str], sort_by: str) -> list[str]:
    """The metric names in the order of a table's columns: the sorting metric, then those of its group, then the rest.

    A group is the part before the last "/". Within it, the ops' main figures come first.
    """
    group = sort_by.rpartition("/")[0]
    main = frozenset().union(*(row.main for row in rows))

    def place(name: str) -> tuple[bool, bool, bool]:
        return name != sort_by, name.rpartition("/")[0] != group, name not in main

    return sorted(dict.fromkeys(names), key=place)


def sorted_rows(graph: Graph, states: Mapping[str, NodeState], found: Sequence[Combination]) -> tuple[list[Row], str]:
    """The combinations as rows, the best first, and the metric that sorts them, "" for none.

    Rows without that metric come last. `sorting` chooses it if no combination has the requested one.
    """
    rows = [_row(each, graph, states) for each in found]
    sort_by, is_least_first = sorting(graph, (name for row in rows for name in row.metrics))
    sign = 1 if is_least_first else -1

    def place(row: Row) -> tuple[bool, float]:
        value = row.metrics.get(sort_by, math.nan)
        return math.isnan(value), 0.0 if math.isnan(value) else sign * value

    return sorted(rows, key=place), sort_by


def main_metrics(graph: Graph, found: Mapping[str, tuple[str, float]]) -> dict[str, float]:
    """The main figures declared by the ops, with the ends of their intervals. found: see `final_metrics`."""
    return {
        name: value for name, (node_id, value) in found.items() if is_main(name, graph.nodes[node_id].op.main_figures)
    }


def _row(combination: Combination, graph: Graph, states: Mapping[str, NodeState]) -> Row:
    found = final_metrics(combination.result_nodes(graph), states)
    metrics = {name: value for name, (_, value) in found.items()}
    return Row(combination, metrics, _state(combination, states), frozenset(main_metrics(graph, found)))


def _state(combination: Combination, states: Mapping[str, NodeState]) -> str:
    failed = [node.id for node in combination.nodes if states[node.id].state == "failed"]
    if failed:
        return f"failed ({', '.join(failed)})"
    return "" if all(states[node.id].state == "done" for node in combination.nodes) else "not done"


def sort_warning(graph: Graph) -> str:
    """A warning before a run that the requested sorting metric is probably misspelt; "" otherwise.

    An op does not declare what it logs, except the metric that it is judged by.
    """
    name = graph.sort_by.removeprefix("-")
    judged = [each.removeprefix("-") for each in _judged_by(graph)]
    if not name or is_judged(name, judged):
        return ""
    ends = [each for each in judged if "/" not in name and each.rpartition("/")[2] == name]
    from difflib import get_close_matches

    near = ends or get_close_matches(name, judged, n=1, cutoff=MISSPELT)
    if not near and "/" in name:
        return ""
    meant = f'did you mean "{near[0]}"?' if near else 'metrics are named with their group, as in "train/loss"'
    return f"the table of the sweep is to be sorted by {name}: {meant}"


def sorting(graph: Graph, names: Iterable[str]) -> tuple[str, bool]:
    """The metric that sorts a sweep's table, and whether the least value comes first. names: the available metrics.

    It is the requested metric, else the first one by which an op is judged; "" if none is available.
    """
    found = set(names)
    wanted = [*filter(None, [graph.sort_by]), *_judged_by(graph)]
    for metric in wanted:
        name = _found(graph, metric.removeprefix("-"), found)
        if name:
            return name, metric.startswith("-")
    chosen = next(iter(_judged_by(graph)), "")
    return chosen.removeprefix("-"), chosen.startswith("-")


def sort_note(graph: Graph, names: Iterable[str]) -> str:
    """A note on why the table is not sorted by the requested metric, with existing metrics; "" where it is."""
    wanted, known = graph.sort_by.removeprefix("-"), sorted(names)
    if not wanted or _found(graph, wanted, known):
        return ""
    if not known:
        return f"not sorted by {wanted}: no combination has any metric yet"
    near = did_you_mean(wanted, known)
    there_are = f"there are: {listed(known, MOST_NAMES)}"
    return f"not sorted by {wanted}: no combination has this metric{f'; {near}' if near else ''}; {there_are}"


def _found(graph: Graph, metric: str, names: Collection[str]) -> str:
    """The name of a metric in the table; where nodes prefix it, that of the graph's first node. "" for none."""
    behind = (f"{shown_id(node)}/{metric}" for node in graph.nodes.values())
    return next((name for name in (metric, *behind) if name in names), "")


def _judged_by(graph: Graph) -> list[str]:
    """The metrics by which the graph's ops are judged, in the order of the graph."""
    return [node.op.judged_by for node in graph.nodes.values() if node.op.judged_by]
