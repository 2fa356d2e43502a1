"""The nodes of a run as a picture, laid out as `dflow graph --picture` lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from attrs import frozen
from markupsafe import Markup

from executor.report.graph_layout import BOX_WIDTH, LINE, PADDING, Box, Layout, Place, layout_of, shown_name, wrapped
from executor.report.run_data import NodeFacts, RunFacts
from executor.report.templates import faint, render
from executor.results.run_table import shown_seconds
from executor.system.output import shown_duration

MOST_DRAWN = 150  # nodes
NARROW = 390.0  # px, a third of the page
ROUND = 5.0  # px of a corner
FILLS = {
    "done": "var(--good)",
    "cached": "var(--info)",
    "running": "var(--warn)",
    "interrupted": "var(--warn)",
    "failed": "var(--bad)",
}


@frozen
class _BoxView:
    """A node in the picture. name_lines: how many of the box's lines are its name."""

    box: Box
    title: str
    fill: str
    name_lines: int


def graph_svg(run: RunFacts) -> tuple[Markup, bool]:
    """The picture, and whether a table fits beside it; a sentence where there are too many nodes."""
    nodes = run.nodes
    if not nodes:
        return faint("the run has no nodes"), False
    if len(nodes) > MOST_DRAWN:
        return faint(f"{len(nodes)} nodes are too many for a picture; see the table"), False
    copies = {node.id: node.copy for row in run.combinations for node in row.combination.nodes}
    names = {node_id: shown_name(node_id, copies.get(node_id)) for node_id in nodes}
    texts = {node_id: [*names[node_id], _state_text(node)] for node_id, node in nodes.items()}
    layout = layout_of({node_id: node.parents for node_id, node in nodes.items()}, texts)
    edges = [(f"{up}, read by {', '.join(paths)}", "".join(paths.values())) for up, paths in _paths(layout).items()]
    boxes = [_box(nodes[node_id], box, len(wrapped(names[node_id][0]))) for node_id, box in layout.boxes.items()]
    sizes = {"width": BOX_WIDTH, "line": LINE, "padding": PADDING}
    return render("graph.svg", "graph", layout, edges, boxes, sizes), layout.width <= NARROW


def _state_text(node: NodeFacts) -> str:
    seconds = shown_duration(node.seconds) if node.seconds is not None else shown_seconds(node.recorded)
    return f"{node.shown_state}, {seconds}" if seconds and node.shown_state != "pending" else node.shown_state


def _paths(layout: Layout) -> dict[str, dict[str, str]]:
    """By node, the paths to its readers: drawn as one line, so that shared parts are no thicker."""
    paths: dict[str, dict[str, str]] = {}
    for (up, down), corners in layout.edges.items():
        paths.setdefault(up, {})[down] = _path(corners)
    return paths


def _path(corners: Sequence[Place]) -> str:
    """Rounded where it turns, with an arrow at its end, which points down."""
    turns = [place for place, following in pairwise(corners) if place != following] + [corners[-1]]
    parts = [f"M{turns[0][0]:.1f} {turns[0][1]:.1f}"]
    for before, here, after in zip(turns, turns[1:], turns[2:], strict=False):
        (x, y), (from_x, from_y) = here, _towards(here, before)
        to_x, to_y = _towards(here, after)
        parts.append(f"L{from_x:.1f} {from_y:.1f}Q{x:.1f} {y:.1f} {to_x:.1f} {to_y:.1f}")
    return "".join([*parts, f"L{turns[-1][0]:.1f} {turns[-1][1]:.1f}m-4 -5l4 5l4 -5"])


def _towards(here: Place, there: Place) -> Place:
    """A corner's radius from here, at most half of the way."""
    length = abs(there[0] - here[0]) + abs(there[1] - here[1])
    share = min(ROUND / length, 0.5)
    return here[0] + (there[0] - here[0]) * share, here[1] + (there[1] - here[1]) * share


def _box(node: NodeFacts, box: Box, name_lines: int) -> _BoxView:
    reason = node.recorded.error or node.recorded.reason
    title = "\n".join(filter(None, (f"{node.id}: {node.op}", _state_text(node), reason)))
    return _BoxView(box, title, FILLS.get(node.shown_state, "var(--none)"), name_lines)
