"""`-s node.field=value`: change single values of a pipeline, as strictly checked as in its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tomli

from dsl.errors import Mistake, PipelineError, did_you_mean
from dsl.graph import Graph, compile_pipeline, graph_to_pipeline
from dsl.op import type_mistake
from dsl.pipeline import Pipeline
from dsl.written import COMMAND_LINE, LAUNCH_FIELDS, WrittenNode, add_checked_node, written_nodes


def override_nodes(nodes: Mapping[str, WrittenNode], overrides: Sequence[str]) -> list[Mistake]:
    """Put the values into the nodes, unchecked; returns what is wrong with the paths.

    A path is `node.field`, `node.launch` or `node.launch.field`. The value is TOML; what is no TOML is a string.
    The bare word `none` is None where the field may be None.
    """
    mistakes = []
    for text in overrides:
        path, equals, value = (part.strip() for part in text.partition("="))
        node_id, _, field = path.partition(".")
        if not equals or not field:
            message = f'expected node.field=value, got "{text}"'
            mistakes.append(Mistake(message, position=COMMAND_LINE))
        elif node_id not in nodes:
            message, hint = f'there is no node "{node_id}"', did_you_mean(node_id, list(nodes))
            mistakes.append(Mistake(message, path, COMMAND_LINE, hint))
        elif field == "op":
            message = "-s changes a node's values, not its op"
            mistakes.append(Mistake(message, path, COMMAND_LINE, "change the op in the file"))
        else:
            mistakes += _put(nodes[node_id], field, value)
    return mistakes


def apply_overrides(pipeline: Pipeline, overrides: Sequence[str]) -> Pipeline:
    """A pipeline with other values. Raises PipelineError with all mistakes in the overrides."""
    nodes = written_nodes(pipeline)
    mistakes = override_nodes(nodes, overrides)
    changed = pipeline.without_nodes()
    for node in nodes.values():
        mistakes += add_checked_node(changed, node)
    if mistakes:
        raise PipelineError(mistakes)
    return changed


def apply_override(pipeline: Pipeline, override: str) -> Pipeline:
    """`apply_overrides` for one."""
    return apply_overrides(pipeline, [override])


def override_graph(graph: Graph, overrides: Sequence[str]) -> Graph:
    """A compiled graph, a recorded one say, with other values, checked anew as a whole.

    Relative paths start at the graph's root. Raises PipelineError with all mistakes.
    """
    return compile_pipeline(apply_overrides(graph_to_pipeline(graph), overrides)) if overrides else graph


def _put(node: WrittenNode, field: str, text: str) -> list[Mistake]:
    node.positions[field] = COMMAND_LINE
    group, _, launch_field = field.partition(".")
    if group == "launch" and launch_field:
        known = LAUNCH_FIELDS.get(launch_field)
        node.launch[launch_field] = _parsed(text, known.type if known else None)
    elif group == "launch":
        value = _parsed(text, None)
        if not isinstance(value, dict):
            return [node.mistake(field, f'expected a table, got "{text}"', "{ nproc = 2 }, or node.launch.nproc=2")]
        node.launch = value
        node.positions.update({f"launch.{name}": COMMAND_LINE for name in value})
    else:
        node.values[field] = _parsed(text, _type_of(node, field))
    return []


def _type_of(node: WrittenNode, field: str) -> Any:
    if node.op is None:
        return str
    if field in node.op.edges:
        return str | None if node.op.edges[field].optional else str
    return node.op.fields[field].type if field in node.op.fields else str


def _parsed(text: str, expected: Any) -> Any:
    if text == "none" and type_mistake(None, expected) is None:
        return None
    try:
        document = tomli.loads(f"value = {text}")
    except tomli.TOMLDecodeError:
        return text
    return document["value"] if len(document) == 1 else text
