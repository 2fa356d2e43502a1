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

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from dsl.convert import member_type, type_mistake, typed_value
from dsl.errors import known_nodes, shortened
from dsl.finding import Field, Finding, Position
from dsl.op import ConfigField
from dsl.tables import TABLE_NAMES
from dsl.toml import KeyPath
from dsl.tree import Tree, owner_path

NONE = "none"


@frozen
class Override:
    """An override from the command line, `-s owner.field=value`. owner: a node, or a table such as "pipeline"."""

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
            message = f"-s cannot change pipeline.{field}"
            mistakes.append(Finding(message, Field(position=position), "change it in the file"))
        else:
            overrides.append(Override(owner, field, value, position))
    return overrides, mistakes


def put_overrides(tree: Tree, overrides: Sequence[Override]) -> list[Override]:
    """Put the values of overrides into the tree, unchecked. Returns the overrides of nodes that the tree lacks."""
    others = []
    for override in overrides:
        if override.owner not in (*TABLE_NAMES, *tree.nodes):
            others.append(override)
            continue
        holder = tree.nodes if override.owner in tree.nodes else tree.values
        try:
            if isinstance(holder.get(override.owner, {}), dict):  # what is no table is reported as such
                _put(tree, override)
        except ValueError as error:
            tree.mistakes.append(Finding(str(error), Field(position=override.position)))
    return others


def unknown_owner(override: Override, nodes: Sequence[str]) -> Finding:
    copies = [node_id for node_id in nodes if node_id.startswith(f"{override.owner}-")]
    hint = f"its copies: {', '.join(copies)}" if copies else known_nodes(override.owner, nodes, TABLE_NAMES)
    return Finding(f'there is no node "{shortened(override.owner)}"', Field(position=override.position), hint)


def overridden_nodes(overrides: Sequence[str]) -> dict[str, str]:
    """A mapping from each override that changes a node to the node's id."""
    owners = {text: text.partition(".")[0].strip() for text in overrides}
    return {text: owner for text, owner in owners.items() if owner not in TABLE_NAMES}


def changed_values(overrides: Sequence[str]) -> list[str]:
    """The overrides that change what is computed: those of nodes, and of the seed."""
    return [text for text in overrides if text in overridden_nodes([text]) or text.startswith("pipeline.seed")]


def _put(tree: Tree, override: Override) -> None:
    """Put one override into the tree. Raises ValueError for a text that opens a TOML value but is invalid."""
    fields = tree.fields(override.owner)
    path, expected, has_default = _declared(fields, override.field)
    op = tree.op(override.owner)
    if op is not None and (edge := op.edges.get(override.field)) is not None:
        expected = str | None if edge.optional else str
    whole = (*owner_path(override.owner), *path)
    field = fields.get(str(path[0]))
    if len(path) == 2 and field is not None and field.table is None:
        table = tree.table(*whole[:-1]) or dict(field.made_default if isinstance(field.made_default, dict) else {})
        tree.put(whole[:-1], table, override.position)  # in which a wrong key is a mistake of the whole
    is_reset = override.text == NONE and has_default and type_mistake(expected, None) is not None
    tree.put(whole, None if is_reset else typed_value(override.text, expected), override.position)
    if is_reset:
        del tree.table(*whole[:-1])[str(path[-1])]


def _declared(fields: Mapping[str, ConfigField], text: str) -> tuple[KeyPath, Any, bool]:
    """The path of a dotted name, the type of its value, and whether it has a default.

    Names: "field", "table.field" or "field.key". Everything after a field that is no declared table is one key.
    """
    name, dot, rest = text.partition(".")
    field = fields.get(name)
    if field is None or not dot:
        return (
            (name, rest) if dot else (name,),
            str if field is None else field.type,
            field is not None and not field.required,
        )
    if field.table is None:
        return (name, rest), member_type(field.type, dict), True
    path, expected, has_default = _declared(field.fields, rest)
    return (name, *path), expected, has_default
