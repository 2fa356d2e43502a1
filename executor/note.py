"""What stands above a run in MLflow: how it ended, its main figures, and where its report is. Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsl.graph import Graph
from executor.combinations import Combination, combinations, final_metrics
from executor.record import NodeState, RunState
from executor.results import result_rows
from executor.sweep_table import shown_metrics, sorted_rows

REPORT = "report.html"
MOST_ROWS = 30
MOST_METRICS = 6


def run_note(state: RunState, graph: Graph, experiment: str, parent: str) -> str:
    """Of a run as a whole: the user's notes first."""
    parts = [graph.notes, f"{_ending(state)}. {_link(experiment, parent)}"]
    alone = [graph.nodes[node_id] for node_id in graph.result_nodes if graph.nodes[node_id].copy is None]
    parts.append(_figures({name: value for name, (_, value) in final_metrics(alone, state.nodes).items()}))
    parts.append(_combinations(graph, state.nodes))
    return "\n\n".join(part for part in parts if part)


def combination_note(combination: Combination, state: RunState, graph: Graph, experiment: str, parent: str) -> str:
    failed = [node.id for node in combination.nodes if state.nodes[node.id].state == "failed"]
    ending = f"Failed: {', '.join(failed)}" if failed else f"One combination of run {state.run}"
    figures = final_metrics(combination.result_nodes(graph), state.nodes)
    shown = _figures({name: value for name, (_, value) in figures.items()})
    return "\n\n".join(part for part in (f"{ending}. {_link(experiment, parent)}", shown) if part)


def _ending(state: RunState) -> str:
    nodes = state.nodes.values()
    cached = sum(node.cache == "hit" for node in nodes)
    failed = [node_id for node_id, node in state.nodes.items() if node.state == "failed"]
    took = f" in {state.ended - state.started:.0f} s" if state.ended is not None else ""
    counted = f"{len(state.nodes)} nodes, {cached} of them cached"
    return f"**{state.status}**{took}: {counted}" + (f"; failed: {', '.join(failed)}" if failed else "")


def _link(experiment: str, parent: str) -> str:
    return f"[Report](#/experiments/{experiment}/runs/{parent}/artifacts/{REPORT})"


def _figures(metrics: Mapping[str, float]) -> str:
    return _table(("metric", "value", "interval"), result_rows(metrics)) if metrics else ""


def _combinations(graph: Graph, states: Mapping[str, NodeState]) -> str:
    """The combinations of a sweep, the best first."""
    found = combinations(graph)
    if not found:
        return ""
    rows, sort_by = sorted_rows(graph, states, found)
    shown = [
        {name: f"{value} {interval}".rstrip() for name, value, interval in result_rows(row.metrics)} for row in rows
    ]
    metrics = shown_metrics(dict.fromkeys(name for cells in shown for name in cells), sort_by)[:MOST_METRICS]
    groups = list(dict.fromkeys(group for each in found for group in each.values))
    table = [
        (
            *(row.combination.values.get(group, "") for group in groups),
            row.state or "done",
            *(cells.get(name, "") for name in metrics),
        )
        for row, cells in zip(rows, shown, strict=True)
    ]
    more = f"\n\nand {len(table) - MOST_ROWS} more" if len(table) > MOST_ROWS else ""
    return _table((*groups, "state", *metrics), table[:MOST_ROWS]) + more


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
