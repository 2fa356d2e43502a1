"""A graph as a picture in text: one line for each node, and lanes that lead from a node to those that read it.

    ●    tokenize
    ├─●  target    <- tokenize
    └─┴─●  capture   <- tokenize, target

A lane ends at its last reader. A line that crosses a lane without reading from it leaves a gap around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsl.graph import Graph

NODE = "●"
PASSES, ENDS = "├", "└"
MIDDLE_PASSES, MIDDLE_ENDS = "┼", "┴"
RIGHT_PASSES, RIGHT_ENDS = "┤", "┘"


def drawn_graph(graph: Graph, states: Mapping[str, str]) -> str:
    """The graph as text with one line per node: its lanes, id, op, state, and the nodes that it reads."""
    pictures = lanes({node.id: node.parents for node in graph.nodes.values()})
    rows = [
        (pictures[node.id], node.id, node.op.name, states.get(node.id, ""), ", ".join(node.parents))
        for node in graph.nodes.values()
    ]
    widths = [max((len(row[place]) for row in rows), default=0) for place in range(4)]
    lines = []
    for *cells, parents in rows:
        shown = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([*shown, f"<- {parents}"] if parents else shown).rstrip())
    return "\n".join(lines)


def levels(parents: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The level of each node: the length of the longest path from a node without parents.

    parents: in an order in which parents come first.
    """
    level: dict[str, int] = {}
    for node_id, ids in parents.items():
        level[node_id] = max((level[parent] + 1 for parent in ids), default=0)
    return level


def rows_of(parents: Mapping[str, Sequence[str]], level: Mapping[str, int]) -> dict[int, list[str]]:
    """The nodes of every level, the first level first, each node roughly below its parents."""
    rows: dict[int, list[str]] = {}
    for node_id, depth in sorted(level.items(), key=lambda each: each[1]):
        rows.setdefault(depth, []).append(node_id)
    place: dict[str, float] = {}
    for row in rows.values():
        if any(parents[node_id] for node_id in row):
            row.sort(key=lambda node_id: sum(place[parent] for parent in parents[node_id]) / len(parents[node_id]))
        place |= {node_id: (k + 1) / (len(row) + 1) for k, node_id in enumerate(row)}
    return rows


def dot(graph: Graph, states: Mapping[str, str]) -> str:
    """The graph in Graphviz's language."""
    lines = [f"digraph {_quoted(graph.name)} {{", "  node [shape=box, style=rounded];"]
    for node in graph.nodes.values():
        shown = "\n".join(filter(None, (node.id, node.op.name, states.get(node.id, ""))))
        lines.append(f"  {_quoted(node.id)} [label={_quoted(shown)}];")
    for node in graph.nodes.values():
        for edge, ids in node.inputs.items():
            lines += [f"  {_quoted(parent)} -> {_quoted(node.id)} [label={_quoted(edge)}];" for parent in ids]
    return "\n".join([*lines, "}"])


def lanes(parents: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The lane picture in each node's line. parents: in an order in which parents come first."""
    unread = dict.fromkeys(parents, 0)
    for ids in parents.values():
        for parent in ids:
            unread[parent] += 1
    owners: list[str | None] = []  # of the lanes
    pictures = {}
    for node_id, ids in parents.items():
        before = list(owners)
        for parent in ids:
            unread[parent] -= 1
            if unread[parent] == 0:
                owners[owners.index(parent)] = None
        place = _lane_of(before, owners, ids)
        pictures[node_id] = _line(before, owners, ids, place)
        owners += [None] * (place + 1 - len(owners))
        owners[place] = node_id if unread[node_id] else None
        while owners and owners[-1] is None:
            owners.pop()
    return pictures


def _lane_of(before: Sequence[str | None], owners: Sequence[str | None], ids: Sequence[str]) -> int:
    """The lane for a node: that of a parent without further readers, else the first free one right of the parents."""
    ended = [lane for lane, owner in enumerate(before) if owner in ids and owners[lane] is None]
    if ended:
        return ended[0]
    start = max((lane + 1 for lane, owner in enumerate(before) if owner in ids), default=0)
    free = (lane for lane in range(start, len(owners)) if owners[lane] is None)
    return next(free, max(start, len(owners)))


def _line(before: Sequence[str | None], after: Sequence[str | None], ids: Sequence[str], place: int) -> str:
    read = [lane for lane, owner in enumerate(before) if owner is not None and owner in ids and lane != place]
    first, last = min([place, *read]), max([place, *read])
    cells = []
    for lane in range(max(len(before), place + 1)):
        owner = before[lane] if lane < len(before) else None
        if lane == place:
            cell = NODE
        elif lane in read:
            cell = _joint(lane, first, last, passes=after[lane] is not None)
        elif owner is not None:
            cell = "│"
        else:
            cell = "─" if first < lane < last else " "
        is_line = first <= lane < last
        cells.append(cell + ("─" if is_line else " "))
    return "".join(cells).rstrip()


def _joint(lane: int, first: int, last: int, *, passes: bool) -> str:
    if lane == first:
        return PASSES if passes else ENDS
    if lane == last:
        return RIGHT_PASSES if passes else RIGHT_ENDS
    return MIDDLE_PASSES if passes else MIDDLE_ENDS


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
