"""Type-check and order a pipeline: `Pipeline` in, compiled `Graph` out, or every mistake at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import cattrs
from attrs import frozen

from dsl.errors import ConfigError, Mistake, PipelineError
from dsl.launch import Launch, Machine
from dsl.op import OpSpec, Ref
from dsl.op_table import load_op
from dsl.pipeline import Node, Pipeline
from dsl.wiring import absolute_path, below, external_value, in_order, inputs_of, wiring_mistakes
from dsl.written import written_nodes

FORMAT = 1


@frozen
class GraphNode:
    """A checked node: external paths in the config are absolute; inputs maps each edge to the ids of its producers."""

    id: str
    config: Any
    op: OpSpec
    launch: Launch
    inputs: Mapping[str, tuple[str, ...]]

    @property
    def parents(self) -> tuple[str, ...]:
        """Ids of all nodes this one reads, each once, in the order of the edges."""
        return tuple(dict.fromkeys(parent for parents in self.inputs.values() for parent in parents))


@frozen
class Graph:
    """A compiled pipeline; nodes come after all their parents, otherwise in the order they were written."""

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

    @property
    def result_nodes(self) -> tuple[str, ...]:
        """The nodes whose figures are the pipeline's: those that no other reads, and those of ops that say so."""
        read = {parent for node in self.nodes.values() for parent in node.parents}
        return tuple(node.id for node in self.nodes.values() if node.id not in read or node.op.shows_results)

    def below(self, node_id: str) -> frozenset[str]:
        """The node and everything that reads from it, directly or not. Raises KeyError for an unknown node."""
        return below({node.id: node.parents for node in self.nodes.values()}, self.nodes[node_id].id)


def compile_pipeline(pipeline: Pipeline) -> Graph:
    """Check references, artifact types, external paths and cycles. Raises PipelineError with all mistakes."""
    mistakes = wiring_mistakes(written_nodes(pipeline), pipeline.root)
    if mistakes:
        raise PipelineError(mistakes)
    nodes = {node.id: _compiled(node, pipeline.root) for node in pipeline.nodes.values()}
    order = in_order({node.id: node.parents for node in nodes.values()})
    return Graph(
        name=pipeline.name,
        seed=pipeline.seed,
        experiment=pipeline.experiment,
        tracking_uri=pipeline.tracking_uri,
        root=pipeline.root,
        op_files=tuple(absolute_path(file, pipeline.root) for file in pipeline.op_files),
        nodes={node_id: nodes[node_id] for node_id in order},
        tags=pipeline.tags,
        notes=pipeline.notes,
        machine=pipeline.machine,
    )


def graph_to_pipeline(graph: Graph) -> Pipeline:
    """The pipeline that compiles to this graph, without positions."""
    pipeline = Pipeline(
        graph.name,
        seed=graph.seed,
        experiment=graph.experiment,
        tracking_uri=graph.tracking_uri,
        root=graph.root,
        op_files=graph.op_files,
        tags=graph.tags,
        notes=graph.notes,
        machine=graph.machine,
    )
    for node in graph.nodes.values():
        pipeline.node(node.id, node.config, launch=node.launch)
    return pipeline


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """The graph as JSON values; a reference is {"ref": node id}, a tuple is a list."""
    nodes = [
        _NodeRecord(node.id, node.op.name, node.op.version, _config_to_json(node), node.launch)
        for node in graph.nodes.values()
    ]
    record = _GraphRecord(
        format=FORMAT,
        name=graph.name,
        seed=graph.seed,
        experiment=graph.experiment,
        tracking_uri=graph.tracking_uri,
        root=str(graph.root),
        op_files=tuple(str(file) for file in graph.op_files),
        nodes=tuple(nodes),
        tags=dict(graph.tags),
        notes=graph.notes,
        machine=graph.machine,
    )
    data: dict[str, Any] = _CONVERTER.unstructure(record)
    return data


def graph_from_json(data: Mapping[str, Any]) -> Graph:
    """The graph of a record as it is: paths in it need not exist any more.

    Raises PipelineError where the record does not fit the ops as they are now.
    """
    try:
        record = _CONVERTER.structure(data, _GraphRecord)
    except cattrs.BaseValidationError as error:
        reasons = "; ".join(cattrs.transform_error(error))
        raise PipelineError([Mistake(f"the recorded graph cannot be read: {reasons}")]) from error
    if record.format != FORMAT:
        message = f"the recorded graph has format {record.format}, this version of dflow reads {FORMAT}"
        raise PipelineError([Mistake(message, hint="use the version of dflow that wrote it, or start a new run")])
    op_files = tuple(Path(file) for file in record.op_files)
    return Graph(
        name=record.name,
        seed=record.seed,
        experiment=record.experiment,
        tracking_uri=record.tracking_uri,
        root=Path(record.root),
        op_files=op_files,
        nodes={node.id: _node_from_record(node, op_files) for node in record.nodes},
        tags=record.tags,
        notes=record.notes,
        machine=record.machine,
    )


@frozen
class _NodeRecord:
    id: str
    op: str
    version: int
    config: dict[str, Any]
    launch: Launch


@frozen
class _GraphRecord:
    format: int
    name: str
    seed: int
    experiment: str
    tracking_uri: str | None
    root: str
    op_files: tuple[str, ...]
    nodes: tuple[_NodeRecord, ...]
    tags: dict[str, str] = attrs.field(factory=dict)
    notes: str = ""
    machine: Machine = attrs.field(factory=Machine)


_CONVERTER = cattrs.Converter(forbid_extra_keys=True, unstruct_collection_overrides={tuple: list})


def _compiled(node: Node, root: Path) -> GraphNode:
    op = node.op
    paths = {
        field.name: external_value(getattr(node.config, field.name), field, root)
        for field in op.fields.values()
        if field.external
    }
    config = attrs.evolve(node.config, **paths) if paths else node.config
    return GraphNode(node.id, config, op, node.launch, inputs_of(op, attrs.asdict(config, recurse=False)))


def _config_to_json(node: GraphNode) -> dict[str, Any]:
    return {
        name: _value_to_json(value, is_edge=name in node.op.edges)
        for name, value in attrs.asdict(node.config, recurse=False).items()
    }


def _value_to_json(value: Any, is_edge: bool) -> Any:
    if isinstance(value, Ref):
        return {"ref": value.node}
    if isinstance(value, (tuple, list)):
        return [_value_to_json(member, is_edge) for member in value]
    if isinstance(value, dict):
        return {key: _value_to_json(member, is_edge) for key, member in value.items()}
    return value


def _value_from_json(value: Any, is_edge: bool) -> Any:
    if is_edge and isinstance(value, dict):
        return Ref(value["ref"])
    if isinstance(value, list):
        return tuple(_value_from_json(member, is_edge) for member in value)
    if isinstance(value, dict):
        return {key: _value_from_json(member, is_edge) for key, member in value.items()}
    return value


def _node_from_record(record: _NodeRecord, op_files: tuple[Path, ...]) -> GraphNode:
    op = load_op(record.op, op_files)
    values = {name: _value_from_json(value, is_edge=name in op.edges) for name, value in record.config.items()}
    try:
        config = op.config_class(**values)
    except ConfigError as error:
        message = f"the recorded config does not fit the op {op.name} as it is now: {error}"
        raise PipelineError([Mistake(message, f"node.{record.id}")]) from error
    return GraphNode(record.id, config, op, record.launch, inputs_of(op, values))
