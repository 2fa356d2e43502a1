"""What the nodes logged over their steps: a chart for each figure, all runs and combinations in it."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence

from attrs import evolve, frozen

from executor.records.metric_points import SYSTEM
from executor.report.chart import drawn, together
from executor.report.columns import node_ids, shared
from executor.report.markup import Markup, details, element, joined, limited, named, paragraph
from executor.report.results import NUMBERED, numbered_charts
from executor.report.run_data import NodeFacts, RunFacts
from ops.lib.report_sections import Chart, Series

# The last parts of the names that everybody looks at, in this order; all others are folded away.
FIRST = ("tau", "loss", "expected_tau", "accuracy", "lr", "grad_norm")
SELECTED = "selected_step"  # logged by a training that chose the weights of a step, beside the figures of its group
NEVER_LOG = "lr"  # a schedule that ends near 0 would show nothing but its end
LEAST_POINTS = 2
MOST_FOLDED = 60  # charts of a node
GPU = re.compile(r"gpu_\d+_")

Points = Mapping[str, list[tuple[float, float]]]  # by metric: step or second, value


@frozen
class _Drawing:
    """A chart of a node: those of its runs are put into one. selected: for each of their series the step to mark."""

    name: str
    charts: Sequence[tuple[str, int, Chart]]
    selected: Sequence[float | None]

    @property
    def title(self) -> str:
        """The whole name of the metric where there is but one, so that `val/tau` is not taken for `train/tau`."""
        names = {series.name for _, _, chart in self.charts for series in chart.series}
        return names.pop() if len(names) == 1 else self.name


def curves(columns: Sequence[RunFacts]) -> Markup:
    """Charts by node, in the order of the data; then, folded away, what the nodes used of the machine.

    Nothing where no node logged anything twice.
    """
    names = node_ids(columns)
    shown = limited(names, lambda node_id: _of_node(shared(columns, node_id)))
    system = limited(names, lambda node_id: _system_of_node(shared(columns, node_id)))
    return joined([shown, details("System: CPU, memory and GPUs that each node used", system) if system else ""])


def _of_node(there: Sequence[tuple[RunFacts, NodeFacts]]) -> Markup:
    points = [(run, logged(node)) for run, node in there]
    drawings = list(_drawings(points, "step"))
    if not drawings:
        return Markup("")
    finals = [(run, {name: of[name][-1][1] for name in of if NUMBERED.fullmatch(name)}) for run, of in points]
    return joined([*_grids(drawings), *numbered_charts(finals)])


def _system_of_node(there: Sequence[tuple[RunFacts, NodeFacts]]) -> Markup:
    drawings = list(_drawings([(run, sampled(node)) for run, node in there], "seconds"))
    return _grid(drawings) if drawings else Markup("")


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
    """Figures of the same last part, `train/loss` and `val/loss`, share a chart, and so do those of all GPUs."""
    kinds = dict.fromkeys(_kind(name) for _, of in points for name in of if not _is_told_elsewhere(name, of))
    for kind in sorted(kinds, key=lambda kind: FIRST.index(kind) if kind in FIRST else len(FIRST)):
        charts = []
        selected: list[float | None] = []
        for run, of in points:
            series = [_series(name, of) for name in of if _kind(name) == kind and not _is_told_elsewhere(name, of)]
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
        yield details(f"{len(shown)} more: {', '.join(drawing.name for drawing in shown)}", _grid(shown))
    if len(others) > MOST_FOLDED:
        names = [drawing.name for drawing in others[MOST_FOLDED:]]
        yield paragraph(f"left out, so that the page stays small: {named(names)}", class_="faint")


def _grid(drawings: Sequence[_Drawing]) -> Markup:
    cells = []
    for drawing in drawings:
        chart, looks = together(drawing.charts)
        looks = [evolve(look, selected=step) for look, step in zip(looks, drawing.selected, strict=True)]
        cells.append(element("div", element("h4", drawing.title), drawn(chart, looks)))
    return element("div", *cells, class_="grid")


def _kind(name: str) -> str:
    return GPU.sub("gpu_", name.rpartition("/")[2])


def _is_told_elsewhere(name: str, names: Container[str]) -> bool:
    """Numbered series have bars of their own, and bounds are drawn around what they bound, where both are there."""
    whole, _, end = name.rpartition("_")
    is_bound = end in ("low", "high") and all(other in names for other in (whole, f"{whole}_low", f"{whole}_high"))
    return is_bound or NUMBERED.fullmatch(name) is not None
