"""The order of a graph that is given as the parents of every node. Nothing here calls itself: chains may be long."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

MOST_STARTS = 50
Parents = Mapping[str, Sequence[str]]  # of every node, by id


def in_order(parents: Parents) -> list[str]:
    """The ids sorted so that parents come first, otherwise in the given order. Nodes on or below cycles are
    left out.
    """
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
    """The nodes that read each node, without repetition, in the given order."""
    children: dict[str, list[str]] = {node_id: [] for node_id in parents}
    for node_id, ids in parents.items():
        for parent in dict.fromkeys(ids):
            children[parent].append(node_id)
    return children


def below(parents: Parents, node_id: str) -> frozenset[str]:
    """The node and everything that reads from it, directly or not."""
    return frozenset(reached([node_id], children_of(parents)))


def above(parents: Parents, node_id: str) -> frozenset[str]:
    """The node and everything that it reads, directly or not."""
    return frozenset(reached([node_id], parents))


def reached(starts: Iterable[T], steps: Mapping[T, Sequence[T]]) -> set[T]:
    """The starts and everything that can be reached from them. steps: item -> next items; items may be
    missing there.
    """
    found = set(starts)
    waiting = list(found)
    while waiting:
        fresh = set(steps.get(waiting.pop(), ())) - found
        found |= fresh
        waiting += fresh
    return found


def cycles(parents: Parents) -> list[list[str]]:
    """A shortest cycle of each strongly connected component, in the direction of the data.

    Each is a list of ids, the first of which is not repeated at the end. In a component of more than MOST_STARTS nodes
    only the first ones are tried as starts, so that the time does not grow with the square of the nodes.
    """
    if len(in_order(parents)) == len(parents):
        return []
    import networkx as nx  # slow to import, so only where there are cycles

    graph = nx.DiGraph((parent, child) for child, ids in parents.items() for parent in ids)
    place = {node_id: number for number, node_id in enumerate(parents)}
    components = [sorted(component, key=place.__getitem__) for component in nx.strongly_connected_components(graph)]
    found = []
    for component in sorted(components, key=lambda ids: place[ids[0]]):
        inside = graph.subgraph(component).copy()
        ways = [nx.shortest_path(inside, start, end) for start in component[:MOST_STARTS] for end in inside.pred[start]]
        if ways:
            found.append(min(ways, key=len))
    return found
