"""The figures of a run as a user reads them: the final metrics of its last nodes, and what they warned of."""

from __future__ import annotations

from collections.abc import Mapping

from executor.lines import columns, print_lines
from executor.record import RunState

METRICS_SHOWN = 4


def print_figures(state: RunState) -> None:
    """The metrics and the warnings of the nodes whose figures are the pipeline's."""
    for node_id in state.result_nodes:
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


def shown_number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """The first few, in one line; nothing where there are none."""
    return ", ".join(f"{name} {shown_number(value)}" for name, value in list(metrics.items())[:METRICS_SHOWN])
