"""A compiled graph as JSON, in records and for stages, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import attrs

from dsl.edge_checks import inputs_of
from dsl.errors import ConfigError, Mistake, PipelineError
from dsl.graph import Graph, GraphNode
from dsl.launch import Launch, Machine
from dsl.op import OpSpec, Ref
from dsl.op_table import load_op
from dsl.pipeline import Copy

FORMAT = 1
Made = TypeVar("Made")
PLAIN = ("name", "seed", "experiment", "tracking_uri", "notes", "sort_by")
TRACKING = "tracking"  # written where it is off


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """The graph as JSON values; a reference is {"ref": node id}, a tuple is a list."""
    return {
        "format": FORMAT,
        **{name: getattr(graph, name) for name in PLAIN},
        **({} if graph.tracking else {TRACKING: False}),
        "root": str(graph.root),
        "op_files": [str(file) for file in graph.op_files],
        "tags": dict(graph.tags),
        "machine": _to_json(graph.machine),
        "nodes": [_node_to_json(node) for node in graph.nodes.values()],
    }


def graph_from_json(data: Mapping[str, Any]) -> Graph:
    """The graph of a record as it is: paths in it need not exist any more.

    Raises PipelineError where the record does not fit the ops as they are now.
    """
    op_files, load = _ops_of(data)
    return Graph(
        **{name: data[name] for name in (*PLAIN, TRACKING) if name in data},
        root=Path(data["root"]),
        op_files=op_files,
        nodes={node["id"]: _node(node, load) for node in data["nodes"]},
        tags=data.get("tags", {}),
        machine=_made(Machine, data.get("machine", {}), "machine"),
    )


def node_to_json(graph: Graph, node_id: str) -> dict[str, Any]:
    """One node for its stage, which need not read the whole graph."""
    return {
        "format": FORMAT,
        "op_files": [str(file) for file in graph.op_files],
        "nodes": [_node_to_json(graph.nodes[node_id])],
    }


def node_from_json(data: Mapping[str, Any]) -> GraphNode:
    """The node of `node_to_json`. Raises as `graph_from_json` does."""
    _, load = _ops_of(data)
    return _node(data["nodes"][0], load)


def _ops_of(data: Mapping[str, Any]) -> tuple[tuple[Path, ...], Callable[[str], OpSpec]]:
    """The user's op files, and what loads an op by its name, each once."""
    if data["format"] != FORMAT:
        message = f"the recorded graph has format {data['format']}, this version of dflow reads {FORMAT}"
        raise PipelineError([Mistake(message, hint="use the version of dflow that wrote it, or start a new run")])
    unknown = data.keys() - {*PLAIN, TRACKING, "format", "root", "op_files", "tags", "machine", "nodes"}
    if unknown:
        raise PipelineError([_unreadable(f"it has {', '.join(sorted(unknown))}", "")])
    op_files = tuple(Path(file) for file in data["op_files"])
    return op_files, cache(lambda name: load_op(name, op_files))


def _node_to_json(node: GraphNode) -> dict[str, Any]:
    row = {
        "id": node.id,
        "op": node.op.name,
        "version": node.op.version,
        "config": _to_json(node.config),
        "launch": _to_json(node.launch),
    }
    return row if node.copy is None else {**row, "copy": _to_json(node.copy)}


def _node(data: Mapping[str, Any], load: Callable[[str], OpSpec]) -> GraphNode:
    op = load(data["op"])
    values = {name: _from_json(value, is_edge=name in op.edges) for name, value in data["config"].items()}
    try:
        config = op.config_class(**values)
    except ConfigError as error:
        message = f"the recorded config does not fit the op {op.name} as it is now: {error}"
        raise PipelineError([Mistake(message, f"node.{data['id']}")]) from error
    launch = _made(Launch, data["launch"], f"node.{data['id']}.launch")
    copy = Copy(**data["copy"]) if "copy" in data else None
    return GraphNode(data["id"], config, op, launch, inputs_of(op, values), copy)


def _made(kind: type[Made], values: Mapping[str, Any], path: str) -> Made:
    """An object of an attrs class from its recorded fields, none of which a newer version of dflow added."""
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise PipelineError([_unreadable(str(error), path)]) from error


def _unreadable(reason: str, path: str) -> Mistake:
    hint = "use the version of dflow that wrote it, or start a new run"
    return Mistake(f"the recorded graph cannot be read: {reason}", path, hint=hint)


def _to_json(value: Any) -> Any:
    if isinstance(value, Ref):
        return {"ref": value.node}
    if attrs.has(type(value)):
        return {name: _to_json(getattr(value, name)) for name in attrs.fields_dict(type(value))}
    if isinstance(value, (tuple, list)):
        return [_to_json(member) for member in value]
    if isinstance(value, dict):
        return {key: _to_json(member) for key, member in value.items()}
    return value


def _from_json(value: Any, *, is_edge: bool) -> Any:
    if is_edge and isinstance(value, dict):
        return Ref(value["ref"])
    if isinstance(value, list):
        return tuple(_from_json(member, is_edge=is_edge) for member in value)
    if isinstance(value, dict):
        return {key: _from_json(member, is_edge=is_edge) for key, member in value.items()}
    return value
