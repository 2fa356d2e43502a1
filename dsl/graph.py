"""A compiled pipeline: its nodes in the order of their edges, and what is asked of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
from attrs import frozen

from dsl.finding import Field, Finding
from dsl.launch import Launch, Machine
from dsl.op import OpSpec
from dsl.order import above, below
from dsl.pipeline import Copy, selected_by

if TYPE_CHECKING:
    import networkx as nx

    from dsl.tree import Tree

T = TypeVar("T")


@frozen
class GraphNode:
    """A checked node: external paths in the config are absolute; inputs maps each edge to the ids of its producers.

    copy: which one it is, where a sweep or for_each copied it.
    """

    id: str
    config: Any
    op: OpSpec
    launch: Launch
    inputs: Mapping[str, tuple[str, ...]]
    copy: Copy | None = None

    @property
    def parents(self) -> tuple[str, ...]:
        """Ids of all nodes this one reads, each once, in the order of the edges."""
        return tuple(dict.fromkeys(parent for parents in self.inputs.values() for parent in parents))

    def by_edge(self, known: Mapping[str, T]) -> dict[str, T | tuple[T, ...] | None]:
        """Of each edge what is known of its producer, None where nothing is; all that is known for a `tuple` edge."""
        found: dict[str, T | tuple[T, ...] | None] = {}
        for name, edge in self.op.edges.items():
            read = tuple(known[parent] for parent in self.inputs.get(name, ()) if parent in known)
            found[name] = read if edge.many else next(iter(read), None)
        return found


@frozen
class Graph:
    """A compiled pipeline; nodes come after all their parents, otherwise in the order they were written.

    tree: what it was compiled from; None for a recorded one.
    """

    name: str
    seed: int
    experiment: str
    tracking_uri: str | None
    root: Path
    op_files: tuple[Path, ...]
    nodes: Mapping[str, GraphNode]
    tags: Mapping[str, str] = attrs.field(factory=dict)
    notes: str = ""
    machine: Machine = attrs.field(factory=Machine)
    sort_by: str = ""
    tracking: bool = True
    upload: tuple[str, ...] = ()
    tree: Tree | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def result_nodes(self) -> tuple[str, ...]:
        """The nodes whose figures are the pipeline's: those that no other reads, and those of ops that say so."""
        read = {parent for node in self.nodes.values() for parent in node.parents}
        return tuple(node.id for node in self.nodes.values() if node.id not in read or node.op.shows_results)

    @property
    def judged_by(self) -> frozenset[str]:
        """The metrics that tell how good the result is, as its ops say."""
        return frozenset(node.op.judged_by.removeprefix("-") for node in self.nodes.values() if node.op.judged_by)

    def mistake(self, node_id: str, message: str) -> Finding:
        """What is wrong with a node that is compiled, and where that is written."""
        if self.tree is None:
            return Finding(message, Field(f"node.{node_id}"))
        return self.tree.mistake(("node", node_id), message)

    def is_uploaded(self, node: GraphNode) -> bool:
        """Whether the whole artifact of a node is sent to MLflow."""
        return not set(self.upload).isdisjoint(_names(node))

    def selected_by(self, name: str) -> tuple[str, ...]:
        """The ids of the node of that name, or of all copies of it; empty where there is neither."""
        return selected_by(name, {node.id: node.copy for node in self.nodes.values()})

    def below(self, node_id: str) -> frozenset[str]:
        """The node and everything that reads from it, directly or not. Raises KeyError for an unknown node."""
        return below({node.id: node.parents for node in self.nodes.values()}, self.nodes[node_id].id)

    def up_to(self, node_ids: Iterable[str]) -> Graph:
        """The same pipeline with these nodes and all above them alone. Raises KeyError for an unknown node."""
        parents = {node.id: node.parents for node in self.nodes.values()}
        kept = frozenset().union(*(above(parents, self.nodes[node_id].id) for node_id in node_ids))
        nodes = {node_id: node for node_id, node in self.nodes.items() if node_id in kept}
        names = {name for node in nodes.values() for name in _names(node)}
        return attrs.evolve(self, nodes=nodes, upload=tuple(name for name in self.upload if name in names))

    def to_networkx(self) -> nx.MultiDiGraph[str]:
        """The nodes by id, each with its `op`, `config` and `launch`; an edge from a node to each that reads it, whose
        key is the field of the one that reads.
        """
        import networkx as nx  # slow to import

        graph: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=self.name)
        for node in self.nodes.values():
            graph.add_node(node.id, op=node.op.name, config=node.config, launch=node.launch)
            graph.add_edges_from((up, node.id, name) for name, ids in node.inputs.items() for up in ids)
        return graph


def _names(node: GraphNode) -> tuple[str, ...]:
    return (node.id,) if node.copy is None else (node.copy.template, node.id)
