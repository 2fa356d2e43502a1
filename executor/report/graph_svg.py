"""The nodes of a run as a picture: a level to a row, the data flows down, lanes on the right lead past levels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from attrs import frozen

from executor.graph_text import levels, rows_of
from executor.report.facts import NodeFacts
from executor.report.markup import Markup, element, void
from executor.results import shown_seconds

BOX_WIDTH, BOX_HEIGHT = 132.0, 40.0
GAP_X, GAP_Y, LANE = 14.0, 24.0, 9.0
LETTERS = 19  # of a name that fit
MOST_DRAWN = 150  # nodes
NARROW = 390.0  # px, a third of the page
FILLS = {
    "done": "var(--good)",
    "cached": "var(--info)",
    "running": "var(--warn)",
    "interrupted": "var(--warn)",
    "failed": "var(--bad)",
}


def graph_svg(nodes: Mapping[str, NodeFacts]) -> Markup:
    """The picture, or a sentence where there are too many nodes for one."""
    if not nodes:
        return element("p", "the run holds no node", class_="faint")
    if len(nodes) > MOST_DRAWN:
        return element("p", f"{len(nodes)} nodes are too many for a picture; see the table", class_="faint")
    layout = _Layout.of(nodes)
    places = {
        node_id: (8 + column * (BOX_WIDTH + GAP_X), 8 + depth * (BOX_HEIGHT + GAP_Y))
        for depth, row in enumerate(layout.rows)
        for column, node_id in enumerate(row)
    }
    lines = [
        _long_edge(places[up], places[down], layout.right + layout.lanes[up] * LANE)
        if (up, down) in layout.long_edges
        else _short_edge(places[up], places[down])
        for down, node in nodes.items()
        for up in node.parents
    ]
    height = 8 + len(layout.rows) * (BOX_HEIGHT + GAP_Y)
    boxes = [_box(nodes[node_id], place) for node_id, place in places.items()]
    size = {"viewBox": f"0 0 {layout.width:.0f} {height:.0f}", "style": f"width: {layout.width:.0f}px; max-width: none"}
    drawing = element("svg", *lines, *boxes, **size, role="img", aria_label="the nodes and what reads from what")
    return element("div", drawing, class_="scroll graph", tabindex="0")


def is_narrow(nodes: Mapping[str, NodeFacts]) -> bool:
    """Whether a table has room beside the picture."""
    return 0 < len(nodes) <= MOST_DRAWN and _Layout.of(nodes).width <= NARROW


@frozen
class _Layout:
    """rows: the nodes of each level. lanes: of the nodes from which an edge leads past a level."""

    rows: Sequence[Sequence[str]]
    long_edges: Collection[tuple[str, str]]
    lanes: Mapping[str, int]

    @classmethod
    def of(cls, nodes: Mapping[str, NodeFacts]) -> _Layout:
        parents = {node_id: node.parents for node_id, node in nodes.items()}
        level = levels(parents)
        long_edges = [(up, down) for down, ids in parents.items() for up in ids if level[down] - level[up] > 1]
        return cls(list(rows_of(parents, level).values()), set(long_edges), lanes_of(long_edges, level))

    @property
    def right(self) -> float:
        """Where the boxes end and the lanes begin."""
        return 8 + max(map(len, self.rows)) * (BOX_WIDTH + GAP_X)

    @property
    def width(self) -> float:
        return self.right + (max(self.lanes.values(), default=-1) + 1) * LANE + 4


def shown_state(node: NodeFacts) -> str:
    """The state as one word: what came from the store is "cached"."""
    return "cached" if node.state == "done" and node.recorded.cache == "hit" else node.state


def lanes_of(edges: Sequence[tuple[str, str]], level: Mapping[str, int]) -> dict[str, int]:
    """A lane for each node with long edges, so that no two lanes of the same number are open at the same level."""
    ends: dict[str, int] = {}
    for up, down in edges:
        ends[up] = max(level[down], ends.get(up, 0))
    lanes: dict[str, int] = {}
    free_from: list[int] = []  # per lane, the level where the last one ended
    for up in sorted(ends, key=lambda node_id: level[node_id]):
        found = next((lane for lane, end in enumerate(free_from) if end < level[up]), len(free_from))
        free_from[found : found + 1] = [ends[up]]
        lanes[up] = found
    return lanes


def _short_edge(up: tuple[float, float], down: tuple[float, float]) -> Markup:
    x, y = up[0] + BOX_WIDTH / 2, up[1] + BOX_HEIGHT
    to_x, to_y = down[0] + BOX_WIDTH / 2, down[1]
    return void(
        "path",
        d=f"M{x:.1f} {y:.1f}C{x:.1f} {y + 14:.1f} {to_x:.1f} {to_y - 14:.1f} {to_x:.1f} {to_y:.1f}m-4 -5l4 5l4 -5",
        class_="edge",
    )


def _long_edge(up: tuple[float, float], down: tuple[float, float], lane: float) -> Markup:
    """From the right side of a box into a lane, down, and into the right side of the other box."""
    start, y = up[0] + BOX_WIDTH, up[1] + BOX_HEIGHT * 0.7
    end, to_y = down[0] + BOX_WIDTH, down[1] + BOX_HEIGHT * 0.3
    into_lane = f"M{start:.1f} {y:.1f}H{lane - 5:.1f}q5 0 5 5"
    out_of_it = f"V{to_y - 5:.1f}q0 5 -5 5H{end:.1f}m5 -4l-5 4l5 4"
    return void("path", d=into_lane + out_of_it, class_="edge")


def _box(node: NodeFacts, place: tuple[float, float]) -> Markup:
    x, y = place
    state = shown_state(node)
    seconds = f"{node.seconds:.1f} s" if node.seconds is not None else shown_seconds(node.recorded)
    told = f"{state}, {seconds}" if seconds and state != "pending" else state
    name = node.id if len(node.id) <= LETTERS else f"{node.id[: LETTERS - 1]}…"
    reason = node.recorded.error or node.recorded.reason
    title = "\n".join(filter(None, (f"{node.id}: {node.op}", told, reason)))
    sizes = {"x": x, "y": y, "width": BOX_WIDTH, "height": BOX_HEIGHT, "rx": 6}
    return element(
        "g",
        element("title", title),
        void("rect", **sizes, class_="box", style=f"fill: {FILLS.get(state, 'var(--none)')}"),
        element("text", name, x=x + BOX_WIDTH / 2, y=y + 17, text_anchor="middle", class_="name"),
        element("text", told, x=x + BOX_WIDTH / 2, y=y + 31, text_anchor="middle"),
    )
