"""What the nodes logged over their steps: a chart for each figure, all runs in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from dsl.sections import Chart, Series
from executor.report.chart import drawn, together
from executor.report.facts import RunFacts
from executor.report.markup import Markup, details, element, joined
from executor.report.results import NUMBERED, numbered_charts

# The last parts of the names that everybody looks at, in this order; all others are folded away.
FIRST = ("loss", "tau", "expected_tau", "accuracy", "lr", "grad_norm")
LEAST_POINTS = 2

Points = Mapping[str, list[tuple[float, float]]]  # by metric: step, value


@frozen
class _Drawing:
    """A chart of a node: its charts run by run are put into one."""

    node: str
    name: str
    charts: Sequence[tuple[str, int, Chart]]


def curves(runs: Sequence[RunFacts]) -> Markup:
    """Charts by node, in the order of the data; nothing where no node logged anything twice."""
    blocks = []
    for node_id in dict.fromkeys(node_id for run in runs for node_id in run.nodes):
        points = [(run, logged(run, node_id)) for run in runs]
        drawings = list(_drawings(node_id, points))
        finals = [{name: of[name][-1][1] for name in of if NUMBERED.fullmatch(name)} for _, of in points]
        slots = numbered_charts(runs, finals) if drawings else []
        if drawings:
            blocks.append(joined([element("h3", node_id), *_grids(drawings), *slots]))
    return joined(blocks)


def logged(run: RunFacts, node_id: str) -> Points:
    """Step and value of each point of a node that counts, in order."""
    found: dict[str, list[tuple[float, float]]] = {}
    node = run.nodes.get(node_id)
    for point in node.events.points if node is not None else ():
        for name, value in point.metrics.items():
            found.setdefault(name, []).append((point.step, value))
    return found


def _drawings(node_id: str, points: Sequence[tuple[RunFacts, Points]]) -> Iterable[_Drawing]:
    """Figures of the same last part, `train/loss` and `val/loss`, share a chart."""
    names = dict.fromkeys(name for _, of in points for name in of)
    kinds = dict.fromkeys(_kind(name) for name in names if not _is_told_elsewhere(name, names))
    for kind in sorted(kinds, key=lambda kind: FIRST.index(kind) if kind in FIRST else len(FIRST)):
        charts = []
        for run, of in points:
            series = [_series(name, of) for name in of if _kind(name) == kind and not _is_told_elsewhere(name, names)]
            if series:
                charts.append((run.label, run.place, Chart(series, "step", "", "lines", log_y=True)))
        if any(len(series.x) >= LEAST_POINTS for _, _, chart in charts for series in chart.series):
            yield _Drawing(node_id, kind, charts)


def _series(name: str, points: Points) -> Series:
    x, y = [step for step, _ in points[name]], [value for _, value in points[name]]
    low, high = dict(points.get(f"{name}_low", ())), dict(points.get(f"{name}_high", ()))
    if not low or not high:
        return Series(name, x, y)
    return Series(name, x, y, [low.get(step) for step in x], [high.get(step) for step in x])


def _grids(drawings: Sequence[_Drawing]) -> Iterable[Markup]:
    first = [drawing for drawing in drawings if drawing.name in FIRST]
    others = [drawing for drawing in drawings if drawing not in first]
    if first:
        yield _grid(first)
    if others:
        yield details(f"{len(others)} more: {', '.join(drawing.name for drawing in others)}", _grid(others))


def _grid(drawings: Sequence[_Drawing]) -> Markup:
    cells = []
    for drawing in drawings:
        cells.append(element("div", element("h4", drawing.name), drawn(*together(drawing.charts))))
    return element("div", *cells, class_="grid")


def _kind(name: str) -> str:
    return name.rpartition("/")[2]


def _is_told_elsewhere(name: str, names: Iterable[str]) -> bool:
    """Numbered series have bars of their own, and bounds are drawn around what they bound."""
    whole, _, end = name.rpartition("_")
    return NUMBERED.fullmatch(name) is not None or (end in ("low", "high") and whole in names)
