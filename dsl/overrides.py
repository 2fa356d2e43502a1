"""`-s node.field=value`: change single values of a pipeline, as strictly checked as in its file.

-s train.lr=3e-4                    a field; the value is TOML, and a bare word is a text where the field is one
-s capture.target_layer_ids=[1,2]   a list
-s node.headers.accept=x            one key of a field that is a table
-s train.dspark.rank=128            one field of a table that the op declares
-s train.launch.nproc=2             one field of the launch; -s train.launch={...}: all of it
-s pipeline.seed=1                  a field of [pipeline], [mlflow] or [machine]
-s train.lr=none                    None where the field may be none, else the op's default again
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from dsl.convert import member_type, structure, takes_table, type_mistake, typed_value
from dsl.document import LAUNCH, TABLE_NAMES
from dsl.edge_checks import Absent
from dsl.errors import PipelineError, known_nodes, shortened
from dsl.finding import Field, Finding, Position
from dsl.for_each import expanded
from dsl.graph import Graph, compile_pipeline, graph_to_pipeline
from dsl.interpolation import interpolate
from dsl.pipeline import Pipeline
from dsl.tables import pipeline_of, tables_of
from dsl.unchecked_node import (
    LAUNCH_FIELDS,
    WrittenNode,
    add_checked_node,
    ops_of,
    table_values,
    unknown_key,
    written_nodes,
)
from dsl.variants import Sweep

NONE = "none"


@frozen
class Override:
    """One `-s owner.field=value`, the owner being a node or a table such as "pipeline"."""

    owner: str
    field: str
    text: str
    position: Position


def parsed_overrides(texts: Sequence[str]) -> tuple[list[Override], list[Finding]]:
    overrides, mistakes = [], []
    for text in texts:
        path, equals, value = (part.strip() for part in text.partition("="))
        owner, _, field = path.partition(".")
        position = Position(f"-s {text}", is_argument=True)
        if not equals or not owner or not all(field.split(".")):
            from dsl.aliases import alias_hint  # only for mistakes

            alias = None if field or not equals else alias_hint(owner, "", {})
            hint = "" if alias is None else alias.text
            mistakes.append(Finding("expected node.field=value", Field(position=position), hint))
        elif field == "op" and owner not in TABLE_NAMES:
            message = "-s changes a node's values, not its op"
            mistakes.append(Finding(message, Field(position=position), "change the op in the file"))
        elif owner == "pipeline" and field in ("ops", "drafts"):
            mistakes.append(
                Finding(f"-s cannot change pipeline.{field}", Field(position=position), "change it in the file")
            )
        else:
            overrides.append(Override(owner, field, value, position))
    return overrides, mistakes


def put_into(owners: Mapping[str, WrittenNode], overrides: Sequence[Override]) -> tuple[list[Override], list[Finding]]:
    """Put the values into the nodes and tables, unchecked. Returns the overrides of others, and what is wrong."""
    others, mistakes = [], []
    ops = ops_of(owners)
    for override in overrides:
        if override.owner in owners:
            mistakes += _put(owners[override.owner], override, ops)
        else:
            others.append(override)
    return others, mistakes


def unknown_owners(overrides: Sequence[Override], owners: Mapping[str, WrittenNode]) -> Iterator[Finding]:
    for override in overrides:
        copies = [owner for owner in owners if owner.startswith(f"{override.owner}-")]
        hint = f"its copies: {', '.join(copies)}" if copies else known_nodes(override.owner, owners, TABLE_NAMES)
        yield Finding(f'there is no node "{shortened(override.owner)}"', Field(position=override.position), hint)


def apply_overrides(pipeline: Pipeline, texts: Sequence[str], sweeps: Sequence[Sweep] = ()) -> Pipeline:
    """A pipeline with other values. Raises PipelineError with all mistakes in the overrides."""
    overrides, mistakes = parsed_overrides(texts)
    tables, nodes = tables_of(pipeline), written_nodes(pipeline)
    for node in nodes.values():
        node.values = _with_open_tables(node)
    overrides, refused = put_into({**tables, **nodes}, overrides)
    mistakes += refused
    nodes, wrong = expanded(nodes, sweeps)
    mistakes += wrong
    overrides, refused = put_into(nodes, overrides)
    mistakes += [*refused, *unknown_owners(overrides, nodes), *interpolate(nodes, tables, only_arguments=True)]
    ops = ops_of(nodes)
    changed, wrong = pipeline_of(tables, pipeline.root, pipeline.op_files, ops)
    changed.root_given, changed.sort_by = pipeline.root_given, pipeline.sort_by
    mistakes += wrong
    for node in nodes.values():
        mistakes += add_checked_node(changed, node, ops)
    if mistakes:
        raise PipelineError(mistakes)
    return changed


def override_graph(graph: Graph, overrides: Sequence[str], absent: Absent | None = None) -> Graph:
    """A compiled graph, such as a recorded one, with other values, checked again as a whole.

    Relative paths start at the graph's root. absent: as of `compile_pipeline`. Raises PipelineError with all mistakes.
    """
    if not overrides:
        return graph
    hint = "give a node its own: -s NODE.seed=1"
    seeds = [each for each in parsed_overrides(overrides)[0] if (each.owner, each.field) == ("pipeline", "seed")]
    message = "the nodes of a recorded run hold their seeds already"
    refused = [Finding(message, Field(position=seed.position), hint) for seed in seeds]
    if refused:
        raise PipelineError(refused)
    return compile_pipeline(apply_overrides(graph_to_pipeline(graph), overrides), absent)


def overridden_nodes(overrides: Sequence[str]) -> dict[str, str]:
    """The overrides that change a node, with the node's id."""
    owners = {text: text.partition(".")[0].strip() for text in overrides}
    return {text: owner for text, owner in owners.items() if owner not in TABLE_NAMES}


def changed_values(overrides: Sequence[str]) -> list[str]:
    """The overrides that change what is computed: values of nodes, and the seed."""
    return [text for text in overrides if text in overridden_nodes([text]) or text.startswith("pipeline.seed")]


def _put(node: WrittenNode, override: Override, ops: Mapping[str, str]) -> list[Finding]:
    name, _, key = override.field.partition(".")
    try:
        if name == "launch" and node.id not in TABLE_NAMES:
            return _put_launch(node, override, key)
        if key:
            return _put_key(node, override, name, key, ops)
        _put_value(node.values, name, override.text, _type_of(node, name), _has_default(node, name))
    except ValueError as error:
        return [Finding(str(error), Field(position=override.position))]
    node.places = node.places.moved(_places(name, node.values.get(name), override))
    return []


def _places(name: str, value: Any, override: Override) -> dict[str, Position]:
    """That of the whole value, and of each key where it is a table."""
    keys = [f"{name}.{key}" for key in value] if isinstance(value, dict) else []
    return dict.fromkeys([name, *keys], override.position)


def _put_value(values: dict[str, Any], name: str, text: str, expected: Any, has_default: bool) -> None:
    if text == NONE and has_default and type_mistake(expected, None) is not None:
        values.pop(name, None)
    else:
        values[name] = typed_value(text, expected)


def _put_launch(node: WrittenNode, override: Override, name: str) -> list[Finding]:
    if name:
        known = LAUNCH_FIELDS.get(name)
        _put_value(node.launch, name, override.text, known.type if known else None, has_default=True)
        node.places = node.places.moved({f"launch.{name}": override.position})
        return []
    value = {} if override.text == NONE else typed_value(override.text, None)
    if not isinstance(value, dict):
        hint = "{ nproc = 2 }, or node.launch.nproc=2"
        return [Finding(f'expected a table, got "{shortened(override.text)}"', Field(position=override.position), hint)]
    node.launch = value
    node.places = node.places.moved(_places(LAUNCH, value, override))
    return []


def _put_key(node: WrittenNode, override: Override, name: str, key: str, ops: Mapping[str, str]) -> list[Finding]:
    """One key of a field that is a table."""
    field = node.fields.get(name)
    if field is None or not (field.table is not None or takes_table(field.type)):
        if node.op is None and node.id not in TABLE_NAMES:
            return []  # the op is unknown, which is reported already
        if field is not None or name in node.edges:
            return [Finding(f'"{name}" has no keys', Field(position=override.position))]
        hint = unknown_key(node, name, ops).text
        return [Finding(f'unknown key "{shortened(name)}"', Field(position=override.position), hint)]
    default = field.default.factory() if isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type]
    before = node.values.get(name, default)
    table = dict(before) if isinstance(before, dict) else {}
    if field.table is None:
        _put_value(table, key, override.text, member_type(field.type, dict), has_default=True)
        node.places = node.places.moved({name: override.position})
    else:
        inner = field.fields.get(key)
        expected, has_default = (str, False) if inner is None else (inner.type, not inner.required)
        _put_value(table, key, override.text, expected, has_default)
        node.places = node.places.moved({f"{name}.{key}": override.position})
    node.values[name] = table
    return []


def _with_open_tables(node: WrittenNode) -> dict[str, Any]:
    """The node's values, each table as TOML has it. A chosen one that is as if it were left out is left out, so that
    another may be chosen.
    """
    values: dict[str, Any] = {}
    for name, value in node.values.items():
        field = node.fields.get(name)
        inside = table_values(value) if field is not None and field.table is not None else None
        if field is None or inside is None:
            values[name] = value
        elif field.chosen_by is None or type_mistake(field.type, {}) or structure(field.type, {}) != value:
            values[name] = inside
    return values


def _has_default(node: WrittenNode, name: str) -> bool:
    return name in node.fields and not node.fields[name].required


def _type_of(node: WrittenNode, name: str) -> Any:
    if name in node.edges:
        return str | None if node.edges[name].optional else str
    return node.fields[name].type if name in node.fields else str
