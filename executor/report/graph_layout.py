"""The positions of a graph's nodes and edges in a picture: a level to a row, the data flows down.

All edges of a node are one bus: out of the bottom of its box, along a track in the gap below its row, down into the
tops of its readers. To rows further down it runs in a lane on the right of all boxes. So no line crosses a box, and
no two nodes' lines overlap.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from attrs import define, field, frozen

from dsl.pipeline import Copy
from executor.report.graph_text import levels, rows_of

BOX_WIDTH, LINE, PADDING = 132.0, 14.0, 6.0
GAP_X, TRACK, LANE, MARGIN = 14.0, 6.0, 9.0, 8.0
ABOVE, BELOW = 6.0, 14.0  # of the tracks of a gap; below them is room for arrows
PORT = 9.0  # between the ends of edges at a box
LETTERS = 19  # of a line in a box
BREAK = re.compile(r"(?<=[-_/, ])")

Place = tuple[float, float]


@frozen
class Box:
    """A node: px from the left and from the top, and the lines of text in it."""

    x: float
    y: float
    height: float
    lines: Sequence[str]

    @property
    def middle(self) -> float:
        return self.x + BOX_WIDTH / 2


@frozen
class Layout:
    """edges: by the node that is read and the one that reads it, the corners from the former's bottom to the latter."""

    width: float
    height: float
    boxes: Mapping[str, Box]
    edges: Mapping[tuple[str, str], Sequence[Place]]


def layout_of(parents: Mapping[str, Sequence[str]], texts: Mapping[str, Sequence[str]]) -> Layout:
    """parents: come first in the order. texts: the lines in each box; long ones are wrapped."""
    level = levels(parents)
    rows = list(rows_of(parents, level).values())
    columns = {node_id: MARGIN + k * (BOX_WIDTH + GAP_X) for row in rows for k, node_id in enumerate(row)}
    lines = {node_id: [line for text in texts[node_id] for line in wrapped(text)] for node_id in parents}
    tall = [2 * PADDING + LINE * max(len(lines[node_id]) for node_id in row) for row in rows]
    long_edges = [(up, down) for down, ids in parents.items() for up in ids if level[down] - level[up] > 1]
    right = max(columns.values(), default=0.0) + BOX_WIDTH + GAP_X
    lanes = {up: right + lane * LANE for up, lane in _lanes_of(long_edges, level).items()}
    gaps = _gaps(parents, level, columns, lanes)
    tops = [MARGIN]
    for gap, height in zip(gaps, tall, strict=True):
        tops.append(tops[-1] + height + ABOVE + BELOW + TRACK * gap.tracks)
    boxes = {
        node_id: Box(columns[node_id], tops[level[node_id]], tall[level[node_id]], lines[node_id])
        for node_id in parents
    }
    for place, gap in enumerate(gaps):
        gap.top = tops[place] + tall[place] + ABOVE
    edges = {
        (up, down): _corners(boxes, up, down, gaps[level[up]], gaps[level[down] - 1], lanes)
        for down, ids in parents.items()
        for up in ids
    }
    height = tops[-1] - BELOW if rows else 0.0
    return Layout(max([right, *(lane + LANE for lane in lanes.values())]), height, boxes, edges)


def shown_name(node_id: str, copy: Copy | None) -> list[str]:
    """The name of a node; for a copy that of its template, and below it each value that was chosen for it."""
    if copy is None:
        return [node_id]
    ends = Counter(_end(group) for group in copy.values)
    return [
        copy.template,
        *(f"{_end(group) if ends[_end(group)] == 1 else group}={value}" for group, value in copy.values.items()),
    ]


def _end(group: str) -> str:
    return group.rpartition(".")[2]


def wrapped(text: str) -> list[str]:
    """Lines that fit a box, broken after a blank, a comma, or one of -, _ and / where possible."""
    lines = [""]
    for part in BREAK.split(text):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > LETTERS:
            lines.append("")
        lines[-1] += part
        while len(lines[-1].rstrip()) > LETTERS:
            lines[-1:] = [lines[-1][:LETTERS], lines[-1][LETTERS:]]
    return [line.rstrip() for line in lines if line.strip()]


@define
class _Gap:
    """A gap below a row. spans: from left to right of each bus. ports: where an edge ends at its box. track: by bus."""

    spans: dict[str, list[float]] = field(factory=dict)
    ports: dict[tuple[str, str], float] = field(factory=dict)
    track: dict[str, int] = field(factory=dict)
    top: float = 0.0

    @property
    def tracks(self) -> int:
        return max(self.track.values(), default=0) + 1

    def assign(self) -> None:
        """Buses share a track where they do not overlap."""
        ends: list[float] = []
        for up, span in sorted(self.spans.items(), key=lambda each: (min(each[1]), max(each[1]))):
            found = next((place for place, end in enumerate(ends) if end + 2 < min(span)), len(ends))
            ends[found : found + 1] = [max(span)]
            self.track[up] = found

    def y(self, up: str) -> float:
        return self.top + TRACK * self.track[up]


def _gaps(
    parents: Mapping[str, Sequence[str]],
    level: Mapping[str, int],
    columns: Mapping[str, float],
    lanes: Mapping[str, float],
) -> list[_Gap]:
    """The gap below each row, with the tracks of the buses in it."""
    gaps = [_Gap() for _ in range(max(level.values(), default=-1) + 1)]
    for down, ids in parents.items():
        gap = gaps[level[down] - 1]
        comes = {up: columns[up] + BOX_WIDTH / 2 if level[up] == level[down] - 1 else lanes[up] for up in ids}
        for up, port in _ports(columns[down] + BOX_WIDTH / 2, comes).items():
            gap.ports[up, down] = port
            gap.spans.setdefault(up, []).extend((comes[up], port))
    for up, lane in lanes.items():
        gaps[level[up]].spans.setdefault(up, []).extend((columns[up] + BOX_WIDTH / 2, lane))
    for gap in gaps:
        gap.assign()
    return gaps


def _ports(middle: float, comes: Mapping[str, float]) -> dict[str, float]:
    """Where edges end at a box: those from directly above in its middle, others to its left and right."""
    ports = {up: middle for up, x in comes.items() if x == middle}
    left = sorted((up for up, x in comes.items() if x < middle), key=lambda up: -comes[up])
    right = sorted((up for up, x in comes.items() if x > middle), key=lambda up: comes[up])
    for side, ids in ((-1, left), (1, right)):
        step = min(PORT, (BOX_WIDTH / 2 - PADDING) / max(len(ids), 1))
        ports |= {up: middle + side * step * (k + 1) for k, up in enumerate(ids)}
    return ports


def _corners(
    boxes: Mapping[str, Box], up: str, down: str, first: _Gap, last: _Gap, lanes: Mapping[str, float]
) -> list[Place]:
    start, port = boxes[up].middle, last.ports[up, down]
    corners = [(start, boxes[up].y + boxes[up].height), (start, first.y(up))]
    if first is not last:
        corners += [(lanes[up], first.y(up)), (lanes[up], last.y(up))]
    return [*corners, (port, last.y(up)), (port, boxes[down].y)]


def _lanes_of(edges: Sequence[tuple[str, str]], level: Mapping[str, int]) -> dict[str, int]:
    """A lane for each node with long edges, so that no two lanes of the same number are open at the same level."""
    ends: dict[str, int] = {}
    for up, down in edges:
        ends[up] = max(level[down], ends.get(up, 0))
    lanes: dict[str, int] = {}
    free_from: list[int] = []  # per lane, the level where the last one ended
    for up in sorted(ends, key=lambda node_id: level[node_id]):
        found = next((lane for lane, end in enumerate(free_from) if end <= level[up]), len(free_from))
        free_from[found : found + 1] = [ends[up]]
        lanes[up] = found
    return lanes
