"""What the nodes logged over their steps: a chart for each figure, all runs and combinations in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from dsl.sections import Chart, Series
from executor.report.chart import drawn, together
from executor.report.columns import node_ids, shared
from executor.report.facts import NodeFacts, RunFacts
from executor.report.markup import Markup, details, element, joined, limited, named, paragraph
from executor.report.results import NUMBERED, numbered_charts

# The last parts of the names that everybody looks at, in this order; all others are folded away.
FIRST = ("loss", "tau", "expected_tau", "accuracy", "lr", "grad_norm")
LEAST_POINTS = 2
MOST_FOLDED = 60  # charts of a node

Points = Mapping[str, list[tuple[float, float]]]  # by metric: step, value


@frozen
class _Drawing:
    """A chart of a node: those of its runs are put into one."""

    name: str
    charts: Sequence[tuple[str, int, Chart]]


def curves(columns: Sequence[RunFacts]) -> Markup:
    """Charts by node, in the order of the data; nothing where no node logged anything twice."""
    return limited(node_ids(columns), lambda node_id: _of_node(shared(columns, node_id)))


def _of_node(there: Sequence[tuple[RunFacts, NodeFacts]]) -> Markup:
    points = [(run, logged(node)) for run, node in there]
    drawings = list(_drawings(points))
    if not drawings:
        return Markup("")
    finals = [(run, {name: of[name][-1][1] for name in of if NUMBERED.fullmatch(name)}) for run, of in points]
    return joined([*_grids(drawings), *numbered_charts(finals)])


def logged(node: NodeFacts) -> Points:
    """Step and value of each point that counts, in order."""
    found: dict[str, list[tuple[float, float]]] = {}
    for point in node.events.points:
        for name, value in point.metrics.items():
            found.setdefault(name, []).append((point.step, value))
    return found


def _drawings(points: Sequence[tuple[RunFacts, Points]]) -> Iterable[_Drawing]:
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
            yield _Drawing(kind, charts)


def _series(name: str, points: Points) -> Series:
    x, y = [step for step, _ in points[name]], [value for _, value in points[name]]
    low, high = dict(points.get(f"{name}_low", ())), dict(points.get(f"{name}_high", ()))
    if not low or not high:
        return Series(name, x, y)
    return Series(name, x, y, [low.get(step) for step in x], [high.get(step) for step in x])


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
        cells.append(element("div", element("h4", drawing.name), drawn(*together(drawing.charts))))
    return element("div", *cells, class_="grid")


def _kind(name: str) -> str:
    return name.rpartition("/")[2]


def _is_told_elsewhere(name: str, names: Iterable[str]) -> bool:
    """Numbered series have bars of their own, and bounds are drawn around what they bound."""
    whole, _, end = name.rpartition("_")
    return NUMBERED.fullmatch(name) is not None or (end in ("low", "high") and whole in names)
