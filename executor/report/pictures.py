"""Pictures drawn by matplotlib: the graph of a pipeline, and the metrics of a node over its steps.

A report holds them as PNG, so that no name in them can be markup.
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from attrs import frozen
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from dsl.files import output_errors
from dsl.graph import Graph
from dsl.pipeline import Copy
from executor.report.graph_text import levels, rows_of
from executor.report.templates import embedded_file
from ops.tools.diagnose.judgement import TABLES, PartFigures

DPI, MOST_PIXELS = 144, 60_000  # of a side, beyond which matplotlib draws nothing
SHOWN = 96  # px of a page to an inch
UNITS = 72.0  # of a graph to an inch, so that a unit is a point
WIDTH, LINE, PADDING, GAP, TITLE, LETTERS = 116.0, 11.0, 4.0, 20.0, 22.0, 20  # of a box, and between boxes
EDGE, BORDER = "#777777", "#999999"
FILLS = {
    "done": "#cdebd6",
    "cached": "#d3e2fa",
    **dict.fromkeys(("runs", "running", "interrupted"), "#fbe6b0"),
    "failed": "#f8cdc8",
}
OTHER = "#e6e8ec"
PANEL = (3.3, 2.2)  # inches
LOG_FROM = 100.0  # times that the largest value exceeds the smallest
NEVER_LOG = "lr"  # a schedule that ends near 0 would show only its end
MOST = 1e30  # of a value
MOST_MARKED = 40  # points of a curve
MOST_PARTS = 12  # of a table of tau


@frozen
class Curve:
    """A curve of values over steps. bounds: the interval at each point; None without."""

    name: str
    points: Sequence[tuple[float, float]]
    bounds: Sequence[tuple[float, float] | None] = ()


@frozen
class Box:
    """The place of a node's box in a drawing, in units from the left and the top."""

    left: float
    top: float
    height: float


def embedded(figure: Figure, alt: str) -> Markup:
    """A figure as an image within the page, in its own size; it scrolls if it is too wide."""
    file = io.BytesIO()
    _save(figure, file, DPI)
    return embedded_file("image/png", file.getvalue(), alt, round(figure.get_figwidth() * SHOWN))


def save_graph(graph: Graph, states: Mapping[str, str], file: Path) -> None:
    """Write a drawing of the graph as PNG, SVG or PDF, by the file's suffix. Raises DflowError if that fails."""
    nodes = graph.nodes.values()
    names = {node.id: shown_name(node.id, node.copy) for node in nodes}
    figure = graph_figure({node.id: node.parents for node in nodes}, names, states, states, graph.name)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": graph.name}), output_errors(file):
        _save(figure, file, min(DPI, MOST_PIXELS / max(figure.get_size_inches())))


def _save(figure: Figure, file: Path | io.BytesIO, dpi: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names may be in any script, values as large as a float
        figure.savefig(file, dpi=dpi)


def shown_name(node_id: str, copy: Copy | None) -> list[str]:
    """A node's name as lines; for a copy the name of the node in the file, then each value chosen for it."""
    if copy is None:
        return [node_id]
    ends = Counter(group.rpartition(".")[2] for group in copy.values)
    short = {group: end if ends[end := group.rpartition(".")[2]] == 1 else group for group in copy.values}
    return [copy.template, *(f"{short[group]}={value}" for group, value in copy.values.items())]


def graph_figure(
    parents: Mapping[str, Sequence[str]],
    names: Mapping[str, Sequence[str]],
    states: Mapping[str, str],
    notes: Mapping[str, str],
    title: str = "",
) -> Figure:
    """A drawing of the graph with one row per level; the data flows down.

    parents: in an order in which parents come first. names: lines of each node's box, see `shown_name`. states: decide
    the colours. notes: the last line of each box.
    """
    rows = list(rows_of(parents, levels(parents)).values())
    lines = {
        node_id: [
            (line, k == 0)
            for k, text in enumerate([*names[node_id], notes.get(node_id, "")])
            for line in textwrap.wrap(text, LETTERS)
        ]
        for node_id in parents
    }
    heights = [2 * PADDING + LINE * max(len(lines[node_id]) for node_id in row) for row in rows]
    width = max(map(len, rows), default=1) * (WIDTH + GAP) + GAP
    top = TITLE if title else PADDING
    tops = [top + sum(heights[:k]) + k * GAP for k in range(len(rows))]
    height = top + sum(heights) + len(rows) * GAP - GAP + PADDING
    is_side = len(rows) > 2 and max(map(len, rows)) == 1  # room for the edges that pass a row by
    right = width + is_side * WIDTH / 2
    figure = Figure(figsize=(right / UNITS, height / UNITS))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, right), ylim=(height, 0))
    axes.set_axis_off()
    axes.text(GAP, TITLE / 2, title, fontsize=9, fontweight="bold", va="center", parse_math=False)
    boxes: dict[str, Box] = {}
    for row, y, tall in zip(rows, tops, heights, strict=True):
        start = (width - len(row) * (WIDTH + GAP) + GAP) / 2
        boxes |= {node_id: Box(start + k * (WIDTH + GAP), y, tall) for k, node_id in enumerate(row)}
    for node_id, box in boxes.items():
        _draw_box(axes, box, FILLS.get(states.get(node_id, ""), OTHER), lines[node_id])
    for down, ids in parents.items():
        for up in ids:
            _draw_edge(axes, boxes[up], boxes[down], f"{up} -> {down}")
    return figure


def _draw_box(axes: Axes, box: Box, fill: str, lines: Sequence[tuple[str, bool]]) -> None:
    """Draw the box of a node. lines: each with a flag whether it is the node's name."""
    shape: dict[str, Any] = {
        "boxstyle": "round,pad=0,rounding_size=6",
        "facecolor": fill,
        "edgecolor": BORDER,
        "linewidth": 0.6,
    }
    axes.add_patch(FancyBboxPatch((box.left, box.top), WIDTH, box.height, **shape))
    for k, (line, is_name) in enumerate(lines):
        middle = (box.left + WIDTH / 2, box.top + PADDING + LINE * (k + 0.5))
        weight = "bold" if is_name else "normal"
        axes.text(*middle, line, ha="center", va="center", fontsize=8, fontweight=weight, parse_math=False)


def _draw_edge(axes: Axes, above: Box, below: Box, name: str) -> None:
    """Draw an edge from the bottom of a box to the top of another; if both are in one column, around the
    boxes between.
    """
    start, end = (above.left + WIDTH / 2, above.top + above.height), (below.left + WIDTH / 2, below.top)
    style = "arc3"
    if above.left == below.left and below.top - start[1] > GAP:
        start = (above.left + WIDTH, above.top + above.height / 2)
        end = (below.left + WIDTH, below.top + below.height / 2)
        style = f"arc3,rad={-min(0.4, 3.8 / math.sqrt(end[1] - start[1])):.3f}"
    look: dict[str, Any] = {
        "arrowstyle": "->",
        "mutation_scale": 9,
        "color": EDGE,
        "linewidth": 0.9,
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=style, zorder=0.5, gid=name, **look))


def curves_figure(panels: Mapping[str, Sequence[Curve]]) -> Figure:
    """A figure with a panel for each title, side by side. An axis is logarithmic where that shows values better."""
    figure = Figure(figsize=(PANEL[0] * len(panels), PANEL[1]), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for curve in curves:
            steps, values = (list(map(_drawable, each)) for each in zip(*curve.points, strict=True))
            marker = "." if len(steps) <= MOST_MARKED else None
            (line,) = axes.plot(steps, values, linewidth=1, marker=marker, markersize=4)
            line.set_label(f" {curve.name}")  # one that began with _ would be left out
            bounds = [
                (step, *map(_drawable, of)) for step, of in zip(steps, curve.bounds, strict=False) if of is not None
            ]
            if bounds:
                axes.fill_between(*zip(*bounds, strict=True), color=line.get_color(), alpha=0.18)
        if title.rpartition("/")[2] != NEVER_LOG and _is_wide([value for curve in curves for _, value in curve.points]):
            axes.set_yscale("log")
        axes.set_title(title, fontsize=9, parse_math=False)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        if len(curves) > 1:
            for text in axes.legend(fontsize=7).get_texts():
                text.set_parse_math(False)
    return figure


def parts_figure(tables: Mapping[str, Sequence[PartFigures]]) -> Figure:
    """A figure with a column for each table of tau by part: tau above, shares of held-out and learnt tokens below.

    Of many parts, the MOST_PARTS with the largest shares are drawn.
    """
    shown = {table: _largest(parts) for table, parts in tables.items()}
    widths = [max(2.6, 1.0 + 0.45 * len(parts)) for parts in shown.values()]
    figure = Figure(figsize=(sum(widths), 4.6), layout="constrained")
    columns = figure.subplots(2, len(shown), squeeze=False, sharex="col", width_ratios=widths, height_ratios=(3, 2)).T
    for (above, below), (table, parts) in zip(columns, shown.items(), strict=True):
        places, taus = range(len(parts)), [_drawable(part.tau) for part in parts]
        reach = [
            [
                max(0.0, tau - _drawable(tau if part.low is None else part.low))
                for tau, part in zip(taus, parts, strict=True)
            ],
            [
                max(0.0, _drawable(tau if part.high is None else part.high) - tau)
                for tau, part in zip(taus, parts, strict=True)
            ],
        ]
        above.errorbar(places, taus, yerr=reach, marker="o", capsize=3, linestyle="", color="#1f4e8c")
        above.set_ylim(0, None)
        above.set_title(TABLES[table], fontsize=8, wrap=True)
        below.bar([place - 0.2 for place in places], [_drawable(part.share) for part in parts], 0.4, label="held out")
        if all(part.learnt is not None for part in parts):
            learnt = [_drawable(part.learnt or 0.0) for part in parts]
            below.bar([place + 0.2 for place in places], learnt, 0.4, label="learnt")
        below.set_ylim(0, 1)
        labels = [part.label if len(part.label) <= LETTERS else f"{part.label[:LETTERS]}..." for part in parts]
        for text in below.set_xticks(places, labels, rotation=30, ha="right") and below.get_xticklabels():
            text.set_parse_math(False)
        for axes in (above, below):
            axes.tick_params(labelsize=7)
            axes.grid(alpha=0.3)
    columns[0][0].set_ylabel("tau", fontsize=8)
    columns[0][1].set_ylabel("share of the tokens", fontsize=8)
    columns[0][1].legend(fontsize=7)
    return figure


def _largest(parts: Sequence[PartFigures]) -> list[PartFigures]:
    """The parts with the largest shares, in the order given."""
    largest = sorted(range(len(parts)), key=lambda place: -parts[place].share)[:MOST_PARTS]
    return [parts[place] for place in sorted(largest)]


def _drawable(value: float) -> float:
    """The value, or NaN where it is not finite or too large for an axis."""
    return float(value) if abs(value) <= MOST else math.nan


def _is_wide(values: Sequence[float]) -> bool:
    """Whether a logarithmic axis shows values better: all are above 0, and they span two powers of ten."""
    finite = [value for value in map(_drawable, values) if not math.isnan(value)]
    return bool(finite) and min(finite) > 1 / MOST and max(finite) >= LOG_FROM * min(finite)
