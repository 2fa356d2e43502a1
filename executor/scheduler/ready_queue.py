"""The nodes that may start: those whose parents are all done, in the order of the graph."""

from __future__ import annotations

import heapq

from dsl.graph import Graph


class ReadyQueue:
    """Hands out every node after all its parents; of those that may start, the first in the graph."""

    def __init__(self, graph: Graph) -> None:
        self._nodes = list(graph.nodes)
        self._place = {node_id: place for place, node_id in enumerate(self._nodes)}
        self._lacking = {node.id: len(node.parents) for node in graph.nodes.values()}
        self._readers: dict[str, list[str]] = {node_id: [] for node_id in self._nodes}
        for node in graph.nodes.values():
            for parent in node.parents:
                self._readers[parent].append(node.id)
        self._ready = [place for place, node_id in enumerate(self._nodes) if not self._lacking[node_id]]

    def next(self) -> str | None:
        """A node that may start and was not handed out before, None if there is none now."""
        return self._nodes[heapq.heappop(self._ready)] if self._ready else None

    def again(self, node_id: str) -> None:
        """Hand out a node once more."""
        heapq.heappush(self._ready, self._place[node_id])

    def done(self, node_id: str) -> None:
        """The node's artifact is in the store."""
        for reader in self._readers[node_id]:
            self._lacking[reader] -= 1
            if not self._lacking[reader]:
                heapq.heappush(self._ready, self._place[reader])

    def place(self, node_id: str) -> int:
        return self._place[node_id]
