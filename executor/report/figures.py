"""The metrics of the runs: final ones with their intervals, those of a sweep's combinations, and curves over the steps.

Metrics are interpreted by their names: `x_low` and `x_high` are the interval of `x`, and `x_01`, `x_02`, ... are values
by slot.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from itertools import zip_longest

from attrs import evolve, frozen
from markupsafe import Markup

from executor.explain.run_diff import MetricPair
from executor.records.metric_points import SYSTEM
from executor.report.chart import drawn, together
from executor.report.run_data import NodeFacts, RunFacts, node_ids, shared
from executor.report.templates import (
    breakable,
    chart_grid,
    faint,
    joined,
    left_out,
    limited,
    mark,
    render,
    run_name,
    table,
)
from executor.results.metric_order import JUDGED, figures_in_order
from executor.results.run_table import result_rows, shown_number, shown_value
from executor.results.sweep import Row, ordered_metrics
from ops.lib.report_sections import NOT_KNOWN, Chart, Series

NUMBERED = re.compile(r"(.+)_(\d{2,})")
LEAST_NUMBERED = 2
MOST_METRICS = 8  # of a combination
MOST_ROWS = 200
# The last parts of the names of the main metrics, in this order; all others are folded.
FIRST = ("tau", "loss", "expected_tau", "accuracy", "lr", "grad_norm")
SELECTED = "selected_step"  # logged by a training that chose the weights of a step
NEVER_LOG = "lr"  # a schedule that ends near 0 would show only its end
LEAST_POINTS = 2
MOST_FOLDED = 60  # charts of a node
GPU = re.compile(r"gpu_\d+_")


Final = Mapping[str, float]
Points = Mapping[str, list[tuple[float, float]]]  # by metric: step or second, value


def results(columns: Sequence[RunFacts]) -> Markup:
    """The metrics of the pipeline's result nodes; those that differ between runs come first."""
    names = list(dict.fromkeys(node_id for column in columns for node_id in column.results))
    shown = limited(names, lambda node_id: _results_of_node(shared(columns, node_id), is_one=len(columns) == 1))
    return shown or faint("No node with results has finished.")


def _results_of_node(there: Sequence[tuple[RunFacts, NodeFacts]], *, is_one: bool) -> Markup:
    finals = [(run, node.recorded.metrics) for run, node in there]
    if not any(final for _, final in finals):
        return Markup("")
    judged = frozenset(name for run, _ in finals for name in run.record.state.judged_by) or JUDGED
    figures = figures_table(finals, is_one=is_one, judged=judged)
    return render("figures.html", "results", figures, chart_grid(_numbered_charts(finals)))


def figures_table(
    finals: Sequence[tuple[RunFacts, Final]], *, is_one: bool, judged: Collection[str] = JUDGED
) -> Markup:
    """A row for each figure, in the order of `figures_in_order`, a column for each run."""
    values = [final for _, final in finals]
    known = {name for final in values for name in final}
    changed = {
        name
        for name in known
        if any(not MetricPair(name, values[0].get(name), final.get(name)).is_same for final in values)
    }
    names = [name for name in figures_in_order(known, judged, changed) if not _is_part(name, values)]
    rows = [[breakable(name), *(_cell(name, values[0], final) for final in values)] for name in names]
    columns = ["figure", "value"] if is_one else ["figure", *(run_name(run) for run, _ in finals)]
    return table(columns, rows, class_="figures")


def _numbered_charts(finals: Sequence[tuple[RunFacts, Final]]) -> list[tuple[str, Markup]]:
    """Bars over the number for each series such as `eval/acceptance_slot_01`, the runs side by side."""
    stems = dict.fromkeys(
        found[1] for _, final in finals for name in final if (found := NUMBERED.fullmatch(name)) is not None
    )
    charts = []
    for stem in stems:
        measured = [(run, values) for run, final in finals if (values := _numbered(stem, final))]
        if max(len(values) for _, values in measured) >= LEAST_NUMBERED:
            label = re.split("[_/]", stem)[-1]
            drawings = [
                (run.label, run.place, Chart([Series(stem, list(values), list(values.values()))], label, "", "bars"))
                for run, values in measured
            ]
            charts.append((stem, drawn(*together(drawings))))
    return charts


def _is_part(name: str, finals: Sequence[Final]) -> bool:
    """Whether another row or chart shows it."""
    names = {name for final in finals for name in final}
    whole, _, end = name.rpartition("_")
    if end in ("low", "high"):
        return {whole, f"{whole}_low", f"{whole}_high"} <= names
    found = NUMBERED.fullmatch(name)
    return found is not None and max(len(_numbered(found[1], final)) for final in finals) >= LEAST_NUMBERED


def _numbered(stem: str, final: Final) -> dict[int, float]:
    found = [(name, NUMBERED.fullmatch(name)) for name in sorted(final)]
    return {int(match[2]): final[name] for name, match in found if match is not None and match[1] == stem}


def _cell(name: str, first: Final, final: Final) -> Markup | None:
    if name not in final:
        return None
    bounds = [shown_number(final[bound]) for bound in (f"{name}_low", f"{name}_high") if bound in final]
    interval = f"[{', '.join(bounds)}]" if len(bounds) == 2 else ""
    pair = MetricPair(name, first.get(name), final[name])
    shown = shown_value(name, final)
    is_unknown = pair.difference is None or pair.is_same or shown == NOT_KNOWN
    return render("figures.html", "figure", shown, interval, "" if is_unknown else f"{pair.difference:+.3g}")


def combinations(runs: Sequence[RunFacts], columns: Sequence[RunFacts]) -> Markup:
    """A table for each run that has a sweep; in the colours of the columns."""
    parts = []
    for run in [run for run in runs if run.combinations]:
        own = [column for column in columns if column.run == run.run]
        rows, sentences = _combination_table(run, own), list(_combination_notes(run, len(own)))
        parts.append(render("figures.html", "combinations", run, len(runs) == 1, rows, sentences))
    return joined(parts)


def _combination_table(run: RunFacts, columns: Sequence[RunFacts]) -> Markup:
    rows = run.combinations[:MOST_ROWS]
    groups = list(dict.fromkeys(group for row in rows for group in row.combination.values))
    judged = frozenset(run.record.state.judged_by) or JUDGED
    figures = [{name: (value, interval) for name, value, interval in result_rows(row.metrics, judged)} for row in rows]
    names = ordered_metrics(rows, (name for cells in figures for name in cells), run.sorted_by)[:MOST_METRICS]
    shown = [
        [
            render("parts.html", "dot", column) if column is not None else "",
            *(row.combination.values.get(group) for group in groups),
            _state(row),
            *(render("figures.html", "figure", *cells[name], "") if name in cells else None for name in names),
        ]
        for column, (row, cells) in zip_longest(columns, zip(rows, figures, strict=True))
    ]
    return table(["", *groups, "state", *names], shown, class_="figures")


def _state(row: Row) -> Markup:
    if not row.state:
        return mark("done", "good")
    return mark(row.state, "bad" if row.state.startswith("failed") else "warn")


def _combination_notes(run: RunFacts, drawn: int) -> Iterable[str]:
    count = len(run.combinations)
    if any(run.sorted_by in row.metrics for row in run.combinations):
        yield f"{count} combinations, by {run.sorted_by}."
    if count > MOST_ROWS:
        yield f"{count - MOST_ROWS} more: dflow status {run.run} --json"
    if count > drawn:
        yield f"Below, the first {drawn} are compared; the others appear only in Pipeline and Configs."


@frozen
class _Drawing:
    """A chart of a node, for all its runs. selected: for each of their series the step to mark."""

    name: str
    charts: Sequence[tuple[str, int, Chart]]
    selected: Sequence[float | None]

    @property
    def title(self) -> str:
        """The whole name of the metric where there is only one: `val/tau` is not `train/tau`."""
        names = {series.name for _, _, chart in self.charts for series in chart.series}
        return names.pop() if len(names) == 1 else self.name


def curves(columns: Sequence[RunFacts]) -> Markup:
    """Charts by node, in the order of the data; then, folded, the nodes' use of the machine.

    Empty where no node logged a metric twice.
    """
    names = node_ids(columns)
    shown = limited(names, lambda node_id: _curves_of_node(shared(columns, node_id)))
    system = limited(names, lambda node_id: _system_of_node(shared(columns, node_id)))
    heading = "System: CPU, memory and GPUs that each node used"
    return joined([shown, *([render("figures.html", "folded", heading, system)] if system else [])])


def _curves_of_node(there: Sequence[tuple[RunFacts, NodeFacts]]) -> Markup:
    points = [(run, logged(node)) for run, node in there]
    drawings = list(_drawings(points, "step"))
    if not drawings:
        return Markup("")
    finals = [(run, {name: of[name][-1][1] for name in of if NUMBERED.fullmatch(name)}) for run, of in points]
    return joined([*_grids(drawings), chart_grid(_numbered_charts(finals))])


def _system_of_node(there: Sequence[tuple[RunFacts, NodeFacts]]) -> Markup:
    drawings = list(_drawings([(run, sampled(node)) for run, node in there], "seconds"))
    return _grid(drawings)


def logged(node: NodeFacts) -> Points:
    """Step and value of each point that counts, in order."""
    found: dict[str, list[tuple[float, float]]] = {}
    for point in node.events.points:
        for name, value in point.metrics.items():
            if not name.startswith(SYSTEM):
                found.setdefault(name, []).append((point.step, value))
    return found


def sampled(node: NodeFacts) -> Points:
    """Of the system metrics, the second since the first of their samples, and value."""
    found: dict[str, list[tuple[float, float]]] = {}
    began: float | None = None
    for point in node.events.points:
        for name, value in point.metrics.items():
            if name.startswith(SYSTEM):
                began = point.time if began is None else began
                found.setdefault(name, []).append((round(point.time - began, 1), value))
    return found


def _drawings(points: Sequence[tuple[RunFacts, Points]], x_label: str) -> Iterable[_Drawing]:
    """Metrics with the same last part, `train/loss` and `val/loss`, share a chart, as do those of all GPUs."""
    kinds = dict.fromkeys(_kind(name) for _, of in points for name in of if not _is_part_of_another(name, of))
    for kind in sorted(kinds, key=lambda kind: FIRST.index(kind) if kind in FIRST else len(FIRST)):
        charts = []
        selected: list[float | None] = []
        for run, of in points:
            series = [_series(name, of) for name in of if _kind(name) == kind and not _is_part_of_another(name, of)]
            selected += [_selected(one.name, of) for one in series]
            if series:
                charts.append((run.label, run.place, Chart(series, x_label, "", "lines", log_y=kind != NEVER_LOG)))
        if any(len(series.x) >= LEAST_POINTS for _, _, chart in charts for series in chart.series):
            yield _Drawing(kind, charts, selected)


def _series(name: str, points: Points) -> Series:
    x, y = [step for step, _ in points[name]], [value for _, value in points[name]]
    low, high = dict(points.get(f"{name}_low", ())), dict(points.get(f"{name}_high", ()))
    if not low or not high:
        return Series(name, x, y)
    return Series(name, x, y, [low.get(step) for step in x], [high.get(step) for step in x])


def _selected(name: str, points: Points) -> float | None:
    """The step that `val/selected_step` names, of `val/tau`."""
    group, _, last = name.rpartition("/")
    steps = points.get(f"{group}/{SELECTED}")
    return steps[-1][1] if steps and last == "tau" else None


def _grids(drawings: Sequence[_Drawing]) -> Iterable[Markup]:
    first = [drawing for drawing in drawings if drawing.name in FIRST]
    others = [drawing for drawing in drawings if drawing.name not in FIRST]
    if first:
        yield _grid(first)
    if others:
        shown = others[:MOST_FOLDED]
        heading = f"{len(shown)} more: {', '.join(drawing.name for drawing in shown)}"
        yield render("figures.html", "folded", heading, _grid(shown))
    if len(others) > MOST_FOLDED:
        yield faint(left_out([drawing.name for drawing in others[MOST_FOLDED:]]))


def _grid(drawings: Sequence[_Drawing]) -> Markup:
    cells = []
    for drawing in drawings:
        chart, looks = together(drawing.charts)
        looks = [evolve(look, selected=step) for look, step in zip(looks, drawing.selected, strict=True)]
        cells.append((drawing.title, drawn(chart, looks)))
    return chart_grid(cells)


def _kind(name: str) -> str:
    return GPU.sub("gpu_", name.rpartition("/")[2])


def _is_part_of_another(name: str, names: Container[str]) -> bool:
    """Numbered series have bars of their own, and intervals are drawn around their metric where it exists."""
    whole, _, end = name.rpartition("_")
    is_bound = end in ("low", "high") and all(other in names for other in (whole, f"{whole}_low", f"{whole}_high"))
    return is_bound or NUMBERED.fullmatch(name) is not None
