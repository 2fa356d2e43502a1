"""How a run ended, as a user reads it: its nodes, the final metrics of the last ones, and what they warned of."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from executor.lines import columns, print_lines
from executor.record import NodeState, RunState

METRICS_SHOWN = 4
ROWS_SHOWN = 40


def print_results(state: RunState, result_nodes: Sequence[str]) -> None:
    """The table of the nodes; then the figures of those that are named."""
    print_lines(nodes_text(state))
    print_figures(state, result_nodes)


def nodes_text(state: RunState) -> str:
    """One row per node: state, where its artifact came from, seconds, digest, and its error or else why it ran.

    Of a long pipeline, what was cached is counted only.
    """
    names = list(state.nodes)
    if len(names) > ROWS_SHOWN:
        names = [node_id for node_id, node in state.nodes.items() if node.state != "done" or node.cache != "hit"]
    rows = [_row(node_id, state.nodes[node_id]) for node_id in names]
    header = ("node", "state", "cache", "seconds", "digest", "why")
    lines = [f"{state.pipeline}, run {state.run}", *columns(header, rows, right=("seconds",)).splitlines()]
    if len(names) < len(state.nodes):
        lines.append(f"and {len(state.nodes) - len(names)} cached nodes")
    return "\n".join(lines)


def _row(node_id: str, node: NodeState) -> tuple[str, ...]:
    why = first_line(node.error) if node.error else node.reason
    return (node_id, node.state, node.cache or "", shown_seconds(node), shown_digest(node.digest), why)


def first_line(text: str) -> str:
    """With a sign where there is more."""
    first, *more = text.splitlines() or [""]
    return f"{first} ..." if more else first


def print_figures(state: RunState, result_nodes: Sequence[str]) -> None:
    """The final metrics and the warnings of nodes that are done."""
    for node_id in result_nodes:
        node = state.nodes[node_id]
        if node.state != "done":
            continue
        if node.metrics:
            table = columns(("metric", "value", "interval"), result_rows(node.metrics), right=("value",))
            print_lines(f"results of {node_id}\n{table}")
        for warning in node.warnings:
            print_lines(f"{node_id}: warning: {warning}")


def result_rows(metrics: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """Name, value and interval of each metric, by name: `x_low` and `x_high` are the interval of `x`, and a numbered
    series such as `x_01`, `x_02`, ... is one row with its first and its last value.
    """
    rows = {}
    series: dict[str, list[str]] = {}
    for name in sorted(metrics):
        whole, _, end = name.rpartition("_")
        bounds = [metrics[bound] for bound in (f"{name}_low", f"{name}_high") if bound in metrics]
        if end.isdecimal():
            series.setdefault(whole, []).append(name)
        elif end not in ("low", "high") or not {whole, f"{whole}_low", f"{whole}_high"} <= metrics.keys():
            interval = f"[{shown_number(bounds[0])}, {shown_number(bounds[1])}]" if len(bounds) == 2 else ""
            rows[name] = (name, shown_number(metrics[name]), interval)
    for names in series.values():
        first, last = names[0], names[-1]
        if first == last:
            rows[first] = (first, shown_number(metrics[first]), "")
        else:
            shown = f"{first}..{last.rpartition('_')[2]}"
            rows[first] = (shown, f"{shown_number(metrics[first])} .. {shown_number(metrics[last])}", "")
    return [rows[name] for name in sorted(rows)]


def shown_digest(digest: str | None) -> str:
    return digest[:12] if digest else ""


def shown_seconds(node: NodeState) -> str:
    """Of a node that runs, the seconds since it began."""
    if node.state == "running" and node.started is not None:
        return f"{time.time() - node.started:.0f} s"
    return "" if node.seconds is None else f"{node.seconds:.1f} s"


def shown_number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """The first few, in one line; nothing where there are none."""
    return ", ".join(f"{name} {shown_number(value)}" for name, value in list(metrics.items())[:METRICS_SHOWN])
