"""A graph as a picture in a file, laid out as in the report. Loads matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from dsl.graph import Graph
from dsl.os_errors import output_errors
from executor.report.graph_layout import BOX_WIDTH, LINE, PADDING, Box, Place, layout_of, shown_name, wrapped

COLOURS = {"cached": "#b7e1cd", "runs": "#fce8b2", "may be cut off": "#c9daf8"}
OTHER = "#eeeeee"
EDGE, BORDER = "#777777", "#666666"
GAP = (math.nan, math.nan)
UNITS = 72.0  # of the layout to an inch, so that a unit is a point
TITLE = 24.0  # above the boxes
LETTER = 7.5  # points
DPI, MOST_PIXELS = 144, 60_000  # of a side, beyond which matplotlib draws nothing


def save_picture(graph: Graph, states: Mapping[str, str], file: Path) -> None:
    """Write a PNG, SVG or PDF, by the end of the name: the data flows down, a level to a row.

    Raises DflowError where the file cannot be written.
    """
    names = {node.id: shown_name(node.id, node.copy) for node in graph.nodes.values()}
    texts = {node_id: [*name, *filter(None, [states.get(node_id, "")])] for node_id, name in names.items()}
    layout = layout_of({node.id: node.parents for node in graph.nodes.values()}, texts)
    width, height = max(layout.width, BOX_WIDTH), layout.height + TITLE
    figure = Figure(figsize=(width / UNITS, height / UNITS))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(layout.height, -TITLE))
    axes.set_axis_off()
    axes.text(8, -TITLE / 3, graph.name, fontsize=9, fontweight="bold", parse_math=False)
    for up in layout.boxes:
        _draw_edges(axes, up, {down: corners for (node_id, down), corners in layout.edges.items() if node_id == up})
    for node_id, box in layout.boxes.items():
        _draw_box(axes, box, COLOURS.get(states.get(node_id, ""), OTHER), len(wrapped(names[node_id][0])))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": graph.name}), output_errors(file):
        figure.savefig(file, dpi=min(DPI, MOST_PIXELS * UNITS / max(width, height)))


def _draw_edges(axes: Axes, up: str, edges: Mapping[str, Sequence[Place]]) -> None:
    """The edges of a node as one line with gaps, so that shared parts are no thicker; in an SVG its id names them."""
    if not edges:
        return
    points: list[Place] = []
    for corners in edges.values():
        x, y = corners[-1]
        points += [*corners, GAP, (x - 3.5, y - 5), (x, y), (x + 3.5, y - 5), GAP]
    name = f"{up}, read by {', '.join(edges)}"
    axes.plot(*zip(*points, strict=True), color=EDGE, linewidth=0.9, solid_joinstyle="round", gid=name)


def _draw_box(axes: Axes, box: Box, fill: str, named: int) -> None:
    """named: how many lines are its name."""
    shape = "round,pad=0,rounding_size=6"
    axes.add_patch(
        FancyBboxPatch(
            (box.x, box.y), BOX_WIDTH, box.height, boxstyle=shape, facecolor=fill, edgecolor=BORDER, zorder=3
        )
    )
    for k, line in enumerate(box.lines):
        weight = "bold" if k < named else "normal"
        where = (box.middle, box.y + PADDING + LINE * (k + 0.5))
        axes.text(
            *where, line, ha="center", va="center", fontsize=LETTER, fontweight=weight, zorder=4, parse_math=False
        )
