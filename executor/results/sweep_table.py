"""The table at the end of a sweep: one row for each combination, with what was chosen and the final metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from dsl.graph import Graph
from executor.records.run_record import NodeState
from executor.results.combinations import Combination, combinations, final_metrics
from executor.results.metric_order import is_main
from executor.results.run_table import result_rows
from executor.results.sweep_order import not_sorted, sorting
from executor.system.output import columns, counted

MOST_METRICS = 6


@frozen
class Row:
    """A combination, the final metrics of its result nodes, and its state: empty where all of it is done.

    main: the names of the metrics that are shown first.
    """

    combination: Combination
    metrics: Mapping[str, float]
    state: str
    main: frozenset[str] = frozenset()


def sweep_table(graph: Graph, states: Mapping[str, NodeState]) -> str:
    """The text; empty where nothing was swept. The best row is the first."""
    found = combinations(graph)
    if not found:
        return ""
    rows, sort_by = sorted_rows(graph, states, found)
    groups = list(dict.fromkeys(group for row in rows for group in row.combination.values))
    shown = [
        {name: (value, interval) for name, value, interval in result_rows(row.metrics, graph.judged_by)} for row in rows
    ]
    metrics = shown_metrics(rows, (name for cells in shown for name in cells), sort_by)
    is_any_open = any(row.state for row in rows)
    header = (*groups, *(["state"] if is_any_open else []), *metrics[:MOST_METRICS])
    table = [
        (
            *(row.combination.values.get(group, "") for group in groups),
            *([row.state or "done"] if is_any_open else []),
            *(" ".join(cells.get(name, ("-", ""))).rstrip() for name in metrics[:MOST_METRICS]),
        )
        for row, cells in zip(rows, shown, strict=True)
    ]
    names = {name for row in rows for name in row.metrics}
    order = f", by {sort_by}" if sort_by in names else ""
    lines = [f"results of {counted(len(rows), 'combination')}{order}", columns(header, table)]
    if len(metrics) > MOST_METRICS:
        lines.append(f"and {len(metrics) - MOST_METRICS} more metrics: dflow ui, dflow status --json")
    return "\n".join([*lines, *filter(None, [not_sorted(graph, names)])])


def shown_metrics(rows: Iterable[Row], names: Iterable[str], sort_by: str) -> list[str]:
    """The metric that sorts the table first, then those of its group, then the others; of both the main ones first."""
    group = sort_by.rpartition("/")[0]
    main = frozenset().union(*(row.main for row in rows))

    def place(name: str) -> tuple[bool, bool, bool]:
        return name != sort_by, name.rpartition("/")[0] != group, name not in main

    return sorted(dict.fromkeys(names), key=place)


def sorted_rows(graph: Graph, states: Mapping[str, NodeState], found: Sequence[Combination]) -> tuple[list[Row], str]:
    """The rows, the best first, those without the metric last; and the metric that they are sorted by, if any.

    Where no combination has the one that was asked for, see `sorting`.
    """
    rows = [_row(each, graph, states) for each in found]
    sort_by, is_least_first = sorting(graph, (name for row in rows for name in row.metrics))
    sign = 1 if is_least_first else -1

    def place(row: Row) -> tuple[bool, float]:
        value = row.metrics.get(sort_by, math.nan)
        return math.isnan(value), 0.0 if math.isnan(value) else sign * value

    return sorted(rows, key=place), sort_by


def main_metrics(graph: Graph, found: Mapping[str, tuple[str, float]]) -> dict[str, float]:
    """Those that their ops call their main figures, with the ends of their intervals. found: of `final_metrics`."""
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
    left = [node.id for node in combination.nodes if states[node.id].state != "done"]
    return "not done" if left else ""
