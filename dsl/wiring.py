"""What can be wrong between nodes: references, artifact types, external paths, cycles; and the order of the nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import networkx

from dsl.errors import Mistake, did_you_mean
from dsl.op import ConfigField, OpSpec, Ref, is_builtin
from dsl.written import COMMAND_LINE, WrittenNode

MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")


def wiring_mistakes(nodes: Mapping[str, WrittenNode], root: Path) -> list[Mistake]:
    """All mistakes between the nodes, also where some nodes are known in part. Paths are relative to root."""
    mistakes: list[Mistake] = []
    for node in nodes.values():
        if node.op is not None:
            mistakes += _edge_mistakes(node, node.op, nodes)
            mistakes += _external_mistakes(node, node.op, root)
            mistakes += _pin_mistakes(node, node.op, root)
            mistakes += _launch_mistakes(node, node.op)
    return [*mistakes, *_cycle_mistakes(nodes)]


def inputs_of(op: OpSpec, values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Edge -> ids of the nodes it reads, in the order of the op's declaration; an edge that is not given has none."""
    inputs = {}
    for edge in op.edges:
        value = values.get(edge)
        references = value if isinstance(value, tuple) else (value,)
        inputs[edge] = tuple(reference.node for reference in references if isinstance(reference, Ref))
    return inputs


def in_order(parents: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Ids with all parents first, otherwise as they come. There must be no cycle."""
    written = {node_id: place for place, node_id in enumerate(parents)}
    order: list[str] = list(networkx.lexicographical_topological_sort(_graph_of(parents), key=written.__getitem__))
    return order


def below(parents: Mapping[str, tuple[str, ...]], node_id: str) -> frozenset[str]:
    """The node and everything that reads from it, directly or not."""
    return frozenset({node_id} | networkx.descendants(_graph_of(parents), node_id))


def absolute_path(path: str | Path, root: Path) -> Path:
    """The path, relative to root, without `..` and with symbolic links as they are."""
    return Path(os.path.normpath(root.absolute() / path))


def external_path(value: object, root: Path) -> Path | None:
    """The absolute path that an external value names; None for a builtin value and for no value."""
    if not isinstance(value, str) or is_builtin(value):
        return None
    return absolute_path(value, root)


def external_value(value: Any, field: ConfigField, root: Path) -> Any:
    """An external value as compiled: an absolute path, or as it is for a builtin value, a model id or None."""
    path = external_path(value, root)
    if path is None or (_may_be_model_id(value, field, path) and not path.exists()):
        return value
    return str(path)


def _may_be_model_id(value: str, field: ConfigField, path: Path) -> bool:
    """Whether "owner/name" names a model: not where there is a folder `owner`, in which `name` is then looked for."""
    return field.model_id and MODEL_ID.fullmatch(value) is not None and not path.parent.is_dir()


def _graph_of(parents: Mapping[str, tuple[str, ...]]) -> Any:
    graph = networkx.DiGraph()
    graph.add_nodes_from(parents)
    graph.add_edges_from((parent, node_id) for node_id, ids in parents.items() for parent in ids)
    return graph


def _edge_mistakes(node: WrittenNode, op: OpSpec, nodes: Mapping[str, WrittenNode]) -> Iterator[Mistake]:
    for name, parents in inputs_of(op, node.values).items():
        wanted = op.edges[name].type
        for parent in parents:
            if parent not in nodes:
                yield node.mistake(name, f'there is no node "{parent}"', did_you_mean(parent, list(nodes)))
                continue
            parent_op = nodes[parent].op
            if parent_op is not None and not issubclass(parent_op.output, wanted):
                message = f'expected {wanted.__name__}, but node "{parent}" gives {parent_op.output.__name__}'
                yield node.mistake(name, message, _who_gives(wanted, nodes))


def _who_gives(wanted: type, nodes: Mapping[str, WrittenNode]) -> str:
    givers = [f'"@{node.id}"' for node in nodes.values() if node.op is not None and issubclass(node.op.output, wanted)]
    return f"{wanted.__name__}: {', '.join(givers)}" if givers else f"no node gives {wanted.__name__}"


def _external_mistakes(node: WrittenNode, op: OpSpec, root: Path) -> Iterator[Mistake]:
    for field in op.fields.values():
        value = node.values.get(field.name)
        path = external_path(value, root) if field.external else None
        if path is None:
            continue
        if not value:
            yield node.mistake(field.name, "expected a path, got an empty string")
        elif not path.exists() and not _may_be_model_id(str(value), field, path):
            hint = "neither a path nor a model id of the form owner/name" if field.model_id else ""
            if not hint and node.positions.get(field.name) != COMMAND_LINE:
                hint = f"put it there, or name another: -s {node.id}.{field.name}=PATH"
            yield node.mistake(field.name, f"there is no file or folder {path}", hint)


def _pin_mistakes(node: WrittenNode, op: OpSpec, root: Path) -> Iterator[Mistake]:
    """A model id enters the key by its name, so what it names must not change: its commit has to be given."""
    for field in op.fields.values():
        value = node.values.get(field.name)
        path = external_path(value, root) if field.pinned_by else None
        if path is None or path.exists() or not _may_be_model_id(str(value), field, path):
            continue
        commit = node.values.get(field.pinned_by)
        if isinstance(commit, str) and COMMIT.fullmatch(commit):
            continue
        given = "none is given" if commit is None else f'"{commit}" may name something else tomorrow, unseen by the key'
        message = f'the model id "{value}" needs a commit here, 40 hex digits: {given}'
        hint = "it stands on the model's page under Files and versions; or give the directory of a checkpoint"
        yield node.mistake(field.pinned_by, message, hint)


def _launch_mistakes(node: WrittenNode, op: OpSpec) -> Iterator[Mistake]:
    if op.single_process and node.launch.get("kind") == "torchrun":
        yield node.mistake("launch.kind", f'the op "{op.name}" runs in one process', 'leave launch out, or "process"')
    if not op.sequence_parallel and node.launch.get("sp_degree", 1) > 1:
        message = f'the op "{op.name}" does no sequence parallelism'
        yield node.mistake("launch.sp_degree", message, "leave sp_degree out; every rank then takes whole sequences")
    told: Mapping[str, str] = getattr(op.config_class, "launch_mistakes", _none)(node.values, node.launch)
    for name, message in told.items():
        yield node.mistake(name, message)


def _none(_values: Mapping[str, Any], _launch: Mapping[str, Any]) -> dict[str, str]:
    return {}


def _cycle_mistakes(nodes: Mapping[str, WrittenNode]) -> Iterator[Mistake]:
    """One shortest cycle through the first written node of every knot, in the direction the data flows."""
    parents = {
        node.id: tuple(parent for ids in inputs_of(node.op, node.values).values() for parent in ids if parent in nodes)
        for node in nodes.values()
        if node.op is not None
    }
    graph = _graph_of(parents)
    knots = {node_id: knot for knot in networkx.strongly_connected_components(graph) for node_id in knot}
    seen: set[str] = set()
    for node_id in parents:
        knot = knots[node_id]
        closing = [parent for parent in parents[node_id] if parent in knot]
        if node_id in seen or not closing:
            continue
        seen |= knot
        inside = graph.subgraph(knot)
        paths = [networkx.shortest_path(inside, node_id, parent) for parent in closing]
        path = min(paths, key=len)
        node = nodes[node_id]
        assert node.op is not None
        inputs = inputs_of(node.op, node.values)
        edge = next(name for name, ids in inputs.items() if path[-1] in ids)
        yield node.mistake(edge, f"the nodes form a cycle: {' -> '.join([*path, node_id])}")
