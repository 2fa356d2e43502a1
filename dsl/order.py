"""The order of a graph that is given as the parents of every node. Nothing here calls itself: chains may be long."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

MOST_STARTS = 50
Parents = Mapping[str, Sequence[str]]  # of every node, by id


def in_order(parents: Parents) -> list[str]:
    """Ids with all parents first, otherwise as they come. Nodes on cycles, and below them, are left out."""
    places = list(parents)
    written = {node_id: place for place, node_id in enumerate(places)}
    children = children_of(parents)
    missing = {node_id: len(set(ids)) for node_id, ids in parents.items()}
    ready = [written[node_id] for node_id, count in missing.items() if count == 0]
    order = []
    while ready:
        node_id = places[heapq.heappop(ready)]
        order.append(node_id)
        for child in children[node_id]:
            missing[child] -= 1
            if missing[child] == 0:
                heapq.heappush(ready, written[child])
    return order


def children_of(parents: Parents) -> dict[str, list[str]]:
    """The nodes that read each node, each once, in the order they come."""
    children: dict[str, list[str]] = {node_id: [] for node_id in parents}
    for node_id, ids in parents.items():
        for parent in dict.fromkeys(ids):
            children[parent].append(node_id)
    return children


def below(parents: Parents, node_id: str) -> frozenset[str]:
    """The node and everything that reads from it, directly or not."""
    return frozenset(_reached(children_of(parents), node_id))


def above(parents: Parents, node_id: str) -> frozenset[str]:
    """The node and everything that it reads, directly or not."""
    return frozenset(_reached(parents, node_id))


def cycles(parents: Parents) -> list[list[str]]:
    """A shortest cycle of every knot (nodes that all read each other), as the data flows.

    Each is a list of ids without the first one's repetition at its end. In a knot of more than MOST_STARTS nodes it is
    a shortest one through any of the first of them, so that the time grows with the nodes and not with their square.
    """
    ordered = set(in_order(parents))
    tangled = {node_id: _within(ids, ordered) for node_id, ids in parents.items() if node_id not in ordered}
    free = set(in_order(children_of(tangled)))  # only below cycles
    knotted = {node_id: _within(ids, free) for node_id, ids in tangled.items() if node_id not in free}
    children = children_of(knotted)
    found = []
    seen: set[str] = set()
    for node_id in knotted:
        if node_id in seen:
            continue
        came_from = _reached(children, node_id)
        knot = came_from.keys() & _reached(knotted, node_id).keys()
        seen |= knot
        starts = [member for member in knotted if member in knot][:MOST_STARTS]
        through = [cycle for start in starts for cycle in _cycles_through(start, knotted, children)]
        if through:
            found.append(min(through, key=len))
    return found


def _cycles_through(start: str, parents: Parents, children: Parents) -> Iterator[list[str]]:
    """A shortest one for every parent that closes one."""
    came_from = _reached(children, start)
    for parent in parents[start]:
        if parent in came_from:
            yield _path(came_from, parent)


def _within(ids: Sequence[str], without: set[str]) -> list[str]:
    return [node_id for node_id in ids if node_id not in without]


def _reached(steps: Mapping[str, Sequence[str]], start: str) -> dict[str, str | None]:
    """All that is reached from a node, the nearest first, each with the node that it was reached from."""
    came_from: dict[str, str | None] = {start: None}
    waiting = deque([start])
    while waiting:
        here = waiting.popleft()
        for there in steps[here]:
            if there not in came_from:
                came_from[there] = here
                waiting.append(there)
    return came_from


def _path(came_from: Mapping[str, str | None], end: str) -> list[str]:
    path = []
    here: str | None = end
    while here is not None:
        path.append(here)
        here = came_from[here]
    return path[::-1]
