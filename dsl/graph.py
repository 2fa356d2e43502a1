"""A compiled pipeline: its nodes in the order of their edges, and what is asked of them; and its JSON in records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
from attrs import frozen
from cattrs.gen import make_dict_unstructure_fn, override

from dsl.check import inputs_of
from dsl.convert import converter, structure, unstructure
from dsl.errors import ConfigError, PipelineError, StructureError
from dsl.finding import Field, Finding
from dsl.launch import Launch, Machine, check_tags
from dsl.op import OpSpec
from dsl.op_table import load_op, use_draft_folders
from dsl.order import above, below
from dsl.pipeline import Copy, selected_by

if TYPE_CHECKING:
    from dsl.tree import Tree

T = TypeVar("T")
FORMAT = 2
OTHER_VERSION = "use the version of dflow that wrote it, or start a new run"


@frozen
class GraphNode:
    """A checked node of a graph. Paths to external files in its config are absolute.

    inputs: edge -> ids of the nodes that it reads. copy: its origin, where a sweep or for_each copied it.
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
        """The known values of the nodes that each edge reads; None for an edge without one, a tuple for a
        `tuple` edge.
        """
        found: dict[str, T | tuple[T, ...] | None] = {}
        for name, edge in self.op.edges.items():
            read = tuple(known[parent] for parent in self.inputs.get(name, ()) if parent in known)
            found[name] = read if edge.many else next(iter(read), None)
        return found


@frozen
class Graph:
    """A compiled pipeline; nodes come after all that they read, otherwise in the order in which they were written.

    tree: the parsed pipeline that it was compiled from; None for a recorded graph.
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
        """The nodes whose metrics are the pipeline's results: those that no node reads, and all of ops with
        shows_results.
        """
        read = {parent for node in self.nodes.values() for parent in node.parents}
        return tuple(node.id for node in self.nodes.values() if node.id not in read or node.op.shows_results)

    @property
    def judged_by(self) -> frozenset[str]:
        """The metrics that tell how good the pipeline's result is, as declared by its ops."""
        return frozenset(node.op.judged_by.removeprefix("-") for node in self.nodes.values() if node.op.judged_by)

    def mistake(self, node_id: str, message: str) -> Finding:
        """A mistake of a compiled node, with its place in the file."""
        if self.tree is None:
            return Finding(message, Field(f"node.{node_id}"))
        return self.tree.mistake(("node", node_id), message)

    def is_uploaded(self, node: GraphNode) -> bool:
        """Whether the whole artifact of a node is sent to MLflow."""
        return not set(self.upload).isdisjoint(_names(node))

    def selected_by(self, name: str) -> tuple[str, ...]:
        """The ids of the node with this name, or of all its copies; empty for an unknown name."""
        return selected_by(name, {node.id: node.copy for node in self.nodes.values()})

    def below(self, node_id: str) -> frozenset[str]:
        """The node and everything that reads from it, directly or not. Raises KeyError for an unknown node."""
        return below({node.id: node.parents for node in self.nodes.values()}, self.nodes[node_id].id)

    def up_to(self, node_ids: Iterable[str]) -> Graph:
        """The graph reduced to these nodes and all above them. Raises KeyError for an unknown node."""
        parents = {node.id: node.parents for node in self.nodes.values()}
        kept = frozenset().union(*(above(parents, self.nodes[node_id].id) for node_id in node_ids))
        nodes = {node_id: node for node_id, node in self.nodes.items() if node_id in kept}
        names = {name for node in nodes.values() for name in _names(node)}
        return attrs.evolve(self, nodes=nodes, upload=tuple(name for name in self.upload if name in names))


def _names(node: GraphNode) -> tuple[str, ...]:
    return (node.id,) if node.copy is None else (node.copy.template, node.id)


@frozen
class NodeData:
    """The JSON form of a node; in its config a reference is "@node"."""

    id: str
    op: str
    version: int
    config: dict[str, Any]
    launch: Launch
    copy: Copy | None = None

    @classmethod
    def of(cls, node: GraphNode) -> NodeData:
        return cls(node.id, node.op.name, node.op.version, unstructure(node.config), node.launch, node.copy)

    def node(self, load: Callable[[str], OpSpec]) -> GraphNode:
        """The node as part of a graph. load: finds an op by name. Raises PipelineError where the config does not fit
        the op.
        """
        op = load(self.op)
        try:
            config = op.config_class(**self.config)
        except ConfigError as error:
            message = f"the recorded config does not fit the op {op.name} as it is now: {error}"
            raise PipelineError([Finding(message, Field(f"node.{self.id}"))]) from error
        inputs = inputs_of(op, attrs.asdict(config, recurse=False))
        return GraphNode(self.id, config, op, self.launch, inputs, self.copy)


@frozen(kw_only=True)
class StageData:
    """The JSON form of one node, with the op files that its op needs."""

    format: int = FORMAT
    op_files: tuple[Path, ...]
    node: NodeData


@frozen(kw_only=True)
class GraphData:
    """The JSON form of a Graph, with the same fields."""

    format: int = FORMAT
    name: str
    seed: int
    experiment: str
    tracking_uri: str | None
    tracking: bool = True
    notes: str = ""
    sort_by: str = ""
    upload: tuple[str, ...] = ()
    root: Path
    op_files: tuple[Path, ...]
    tags: dict[str, str] = attrs.field(factory=dict)
    machine: Machine = attrs.field(factory=Machine)
    nodes: tuple[NodeData, ...]


SETTINGS = [each.name for each in attrs.fields(GraphData) if each.name not in ("format", "nodes")]
converter.register_unstructure_hook(
    NodeData, make_dict_unstructure_fn(NodeData, converter, copy=override(omit_if_default=True))
)


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """The graph as JSON values; a reference is "@node", a tuple is a list."""
    settings = {name: getattr(graph, name) for name in SETTINGS}
    data: dict[str, Any] = unstructure(GraphData(nodes=tuple(map(NodeData.of, graph.nodes.values())), **settings))
    return data


def graph_from_json(values: Mapping[str, Any]) -> Graph:
    """The graph of a run's record, unchanged: its paths need not exist any more.

    Raises PipelineError where the record does not fit the current ops.
    """
    data = _read(GraphData, values)
    try:
        check_tags(data.tags)
    except ConfigError as error:
        raise PipelineError([Finding(f"the recorded graph cannot be read: {error}", advice=OTHER_VERSION)]) from error
    load = _ops_of(data.op_files)
    nodes = {each.id: each.node(load) for each in data.nodes}
    return Graph(nodes=nodes, **{name: getattr(data, name) for name in SETTINGS})


def node_to_json(graph: Graph, node_id: str) -> dict[str, Any]:
    """The JSON form of one node for its stage, which then need not read the whole graph."""
    data: dict[str, Any] = unstructure(StageData(op_files=graph.op_files, node=NodeData.of(graph.nodes[node_id])))
    return data


def node_from_json(values: Mapping[str, Any]) -> GraphNode:
    """The node in the JSON that `node_to_json` made. Raises as `graph_from_json` does."""
    data = _read(StageData, values)
    return data.node.node(_ops_of(data.op_files))


def _ops_of(op_files: tuple[Path, ...]) -> Callable[[str], OpSpec]:
    """A function that finds ops by name; the draft algorithms among the op files are registered first."""
    if op_files:
        use_draft_folders(op_files)
    return cache(lambda name: load_op(name, op_files))


def _read(expected: type[T], values: Mapping[str, Any]) -> T:
    if values["format"] != FORMAT:
        message = f"the recorded graph has format {values['format']}, this version of dflow reads {FORMAT}"
        raise PipelineError([Finding(message, advice=OTHER_VERSION)])
    try:
        return structure(expected, values)
    except StructureError as error:
        wrong = [f"{each.path}: {each.what}" if each.path else each.what for each in error.mistakes]
        mistakes = [Finding(f"the recorded graph cannot be read: {each}", advice=OTHER_VERSION) for each in wrong]
        raise PipelineError(mistakes) from error
