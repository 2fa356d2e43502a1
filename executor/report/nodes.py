"""The pipeline of each run: its picture, and the time, the memory and the disk of each node."""

from __future__ import annotations

from collections.abc import Sequence

from executor.maintenance.disk_use import shown_size
from executor.report.chart import drawn, together
from executor.report.graph_svg import graph_svg, is_narrow, shown_state
from executor.report.markup import Markup, details, element, joined, shown_duration, table
from executor.report.overview import run_name
from executor.report.run_data import NodeFacts, RunFacts
from executor.results.run_table import first_line
from ops.lib.report_sections import Chart, Series

MARKS = {"done": "good", "cached": "info", "failed": "bad", "running": "warn", "interrupted": "warn"}
MOST_BARS = 40
GPU = "GPU memory"
NAMES = ("node", "op", "state", "time", "memory", GPU, "disk", "artifact", "why")


def pipelines(runs: Sequence[RunFacts]) -> Markup:
    """The graph with a table of the nodes beside or below it; of several runs the graphs, the tables folded away."""
    if len(runs) == 1:
        return element("div", graph_svg(runs[0]), _table(runs[0]), class_="beside" if is_narrow(runs[0]) else None)
    cells = [element("div", element("h3", run_name(run)), graph_svg(run)) for run in runs]
    tables = [details(joined([run_name(run), ": all nodes"]), _table(run)) for run in runs]
    return joined([element("div", *cells, class_="wide-grid"), *tables])


def time_and_disk(runs: Sequence[RunFacts]) -> Markup:
    """How long the nodes took, whichever run it was, and how large their artifacts are."""
    charts = [
        _bars(runs, "seconds", [{node.id: node.seconds for node in run.nodes.values()} for run in runs]),
        _bars(runs, "megabytes", [{node.id: _megabytes(node) for node in run.nodes.values()} for run in runs]),
    ]
    return element("div", *charts, class_="grid")


def _bars(runs: Sequence[RunFacts], label: str, values: Sequence[dict[str, float | None]]) -> Markup:
    drawings = []
    for run, of_run in zip(runs, values, strict=True):
        known = {node_id: value for node_id, value in of_run.items() if value is not None}
        if 0 < len(known) <= MOST_BARS:
            series = Series(label, list(known), list(known.values()))
            drawings.append((run.label, run.place, Chart([series], "node", label, "bars")))
    if not drawings:
        return Markup("")
    chart, looks = together(drawings)
    return element("div", element("h4", f"{label} by node"), drawn(chart, looks))


def _table(run: RunFacts) -> Markup:
    """Without the GPUs where no node used one."""
    rows = [_row(node) for node in run.nodes.values()]
    names = [name for name in NAMES if name != GPU or any(row[name] is not None for row in rows)]
    return table(names, [[row[name] for name in names] for row in rows], class_="nodes")


def _row(node: NodeFacts) -> dict[str, object]:
    recorded, state = node.recorded, shown_state(node)
    why = first_line(recorded.error) if recorded.error else recorded.reason
    if state == "cached":
        why = f"from run {recorded.source_run}" if recorded.source_run else "it was there"
    size = "gone" if node.is_gone else None
    cells: list[object] = [
        node.id,
        node.op,
        element("span", state, class_=f"mark {MARKS.get(state, '')}"),
        None if node.seconds is None else shown_duration(node.seconds),
        None if node.memory is None else shown_size(node.memory),
        None if node.gpu_memory is None else shown_size(node.gpu_memory),
        size if node.size is None else shown_size(node.size),
        (recorded.digest or "")[:12] or None,
        why or None,
    ]
    return dict(zip(NAMES, cells, strict=True))


def _megabytes(node: NodeFacts) -> float | None:
    return None if node.size is None else node.size / 1e6
