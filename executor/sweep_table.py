"""The table at the end of a sweep: one row for each combination, with what was chosen and the final metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from dsl.graph import Graph
from executor.combinations import Combination, combinations, final_metrics
from executor.lines import columns
from executor.record import NodeState
from executor.results import result_rows

MOST_METRICS = 6


@frozen
class Row:
    """A combination, the final metrics of its result nodes, and its state: empty where all of it is done."""

    combination: Combination
    metrics: Mapping[str, float]
    state: str


def sweep_table(graph: Graph, states: Mapping[str, NodeState]) -> str:
    """The text; empty where nothing was swept. The best row is the first."""
    found = combinations(graph)
    if not found:
        return ""
    rows, sort_by = sorted_rows(graph, states, found)
    groups = list(dict.fromkeys(group for row in rows for group in row.combination.values))
    shown = [{name: (value, interval) for name, value, interval in result_rows(row.metrics)} for row in rows]
    metrics = shown_metrics(dict.fromkeys(name for cells in shown for name in cells), sort_by)
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
    order = f", by {sort_by}" if sort_by in metrics else ""
    lines = [f"results of {len(rows)} combinations{order}", columns(header, table)]
    if len(metrics) > MOST_METRICS:
        lines.append(f"and {len(metrics) - MOST_METRICS} more metrics: dflow ui, dflow status --json")
    if graph.sort_by and sort_by not in metrics:
        lines.append(f"not sorted: no combination has the metric {sort_by}")
    return "\n".join(lines)


def shown_metrics(names: Iterable[str], sort_by: str) -> list[str]:
    """The metric that sorts the table first, then those of its group, then the others."""
    group = sort_by.rpartition("/")[0]
    return sorted(names, key=lambda name: (name != sort_by, name.rpartition("/")[0] != group))


def sorted_rows(graph: Graph, states: Mapping[str, NodeState], found: Sequence[Combination]) -> tuple[list[Row], str]:
    """The rows, the best first, those without the metric last; and the metric that they are sorted by, if any."""
    rows = [Row(each, _values(final_metrics(each.result_nodes(graph), states)), _state(each, states)) for each in found]
    asked = graph.sort_by or next((node.op.judged_by for node in graph.nodes.values() if node.op.judged_by), "")
    sort_by = asked.removeprefix("-")
    sign = 1 if asked.startswith("-") else -1

    def place(row: Row) -> tuple[bool, float]:
        value = row.metrics.get(sort_by, math.nan)
        return math.isnan(value), 0.0 if math.isnan(value) else sign * value

    return sorted(rows, key=place), sort_by


def _values(metrics: Mapping[str, tuple[str, float]]) -> dict[str, float]:
    return {name: value for name, (_, value) in metrics.items()}


def _state(combination: Combination, states: Mapping[str, NodeState]) -> str:
    failed = [node.id for node in combination.nodes if states[node.id].state == "failed"]
    if failed:
        return f"failed ({', '.join(failed)})"
    left = [node.id for node in combination.nodes if states[node.id].state != "done"]
    return "not done" if left else ""
