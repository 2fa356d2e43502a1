"""The nodes of a run as a picture, laid out as `dflow graph --picture` lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from executor.report.graph_layout import BOX_WIDTH, LINE, PADDING, Box, Layout, Place, layout_of, shown_name, wrapped
from executor.report.markup import Markup, element, shown_duration, void
from executor.report.run_data import NodeFacts, RunFacts
from executor.results.run_table import shown_seconds

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


def graph_svg(run: RunFacts) -> Markup:
    """The picture, or a sentence where there are too many nodes for one."""
    nodes = run.nodes
    if not nodes:
        return element("p", "the run holds no node", class_="faint")
    if len(nodes) > MOST_DRAWN:
        return element("p", f"{len(nodes)} nodes are too many for a picture; see the table", class_="faint")
    layout, names = _laid_out(run), _names(run)
    lines = [
        element("path", element("title", f"{up}, read by {', '.join(edges)}"), d="".join(edges.values()), class_="edge")
        for up, edges in _paths(layout).items()
    ]
    boxes = [_box(nodes[node_id], box, _lines(names[node_id])) for node_id, box in layout.boxes.items()]
    size = f"width: {layout.width:.0f}px; max-width: none"
    view = f"0 0 {layout.width:.0f} {layout.height:.0f}"
    label = "the nodes and what reads from what"
    drawing = element("svg", *lines, *boxes, viewBox=view, style=size, role="img", aria_label=label)
    return element("div", drawing, class_="scroll graph", tabindex="0")


def is_narrow(run: RunFacts) -> bool:
    """Whether a table has room beside the picture."""
    return 0 < len(run.nodes) <= MOST_DRAWN and _laid_out(run).width <= NARROW


def shown_state(node: NodeFacts) -> str:
    """The state as one word: what came from the store is "cached"."""
    return "cached" if node.state == "done" and node.recorded.cache == "hit" else node.state


def _laid_out(run: RunFacts) -> Layout:
    texts = {node_id: [*name, _told(run.nodes[node_id])] for node_id, name in _names(run).items()}
    return layout_of({node_id: node.parents for node_id, node in run.nodes.items()}, texts)


def _names(run: RunFacts) -> dict[str, list[str]]:
    """Of copies by what was chosen for them, as far as the combinations can be told."""
    copies = {node.id: node.copy for row in run.combinations for node in row.combination.nodes}
    return {node_id: shown_name(node_id, copies.get(node_id)) for node_id in run.nodes}


def _told(node: NodeFacts) -> str:
    state = shown_state(node)
    seconds = shown_duration(node.seconds) if node.seconds is not None else shown_seconds(node.recorded)
    return f"{state}, {seconds}" if seconds and state != "pending" else state


def _lines(name: Sequence[str]) -> int:
    """How many lines of the box the name as it was written takes."""
    return len(wrapped(name[0]))


def _paths(layout: Layout) -> dict[str, dict[str, str]]:
    """By node, the path to each that reads it: drawn as one line, so that what they share is no thicker."""
    paths: dict[str, dict[str, str]] = {}
    for (up, down), corners in layout.edges.items():
        paths.setdefault(up, {})[down] = _path(corners)
    return paths


def _path(corners: Sequence[Place]) -> str:
    """Rounded where it turns, with an arrow at its end, which is led to from above."""
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


def _box(node: NodeFacts, box: Box, named: int) -> Markup:
    """named: how many lines are its name."""
    reason = node.recorded.error or node.recorded.reason
    title = "\n".join(filter(None, (f"{node.id}: {node.op}", _told(node), reason)))
    sizes = {"x": box.x, "y": f"{box.y:.1f}", "width": BOX_WIDTH, "height": f"{box.height:.1f}", "rx": 6}
    lines = [
        element(
            "text",
            line,
            x=box.middle,
            y=f"{box.y + PADDING + LINE * k + 11:.1f}",
            text_anchor="middle",
            class_="name" if k < named else None,
        )
        for k, line in enumerate(box.lines)
    ]
    fill = f"fill: {FILLS.get(shown_state(node), 'var(--none)')}"
    return element("g", element("title", title), void("rect", **sizes, class_="box", style=fill), *lines)
