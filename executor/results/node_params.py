"""The parameters of a node: its config and launch as flat values."""

from __future__ import annotations

from typing import Any

import attrs

from dsl.convert import flat, unstructure
from dsl.graph import GraphNode
from dsl.launch import Launch
from dsl.shown import toml_text


def params(node: GraphNode, *, edges: bool = True) -> dict[str, str]:
    """The values as texts: as TOML has them, but no quotes around a text."""
    return {
        name: value if isinstance(value, str) else toml_text(value) for name, value in values(node, edges=edges).items()
    }


def values(node: GraphNode, *, edges: bool = True) -> dict[str, Any]:
    """The flat config, tables as "table.key", and the launch values that are no defaults; edges: also the nodes that
    are read.
    """
    names = [*(node.op.edges if edges else ()), *node.op.fields]
    config = {name: getattr(node.config, name) for name in names}
    given = {name: value for name, value in config.items() if value is not None or name in node.op.fields}
    usual = Launch()
    launch = {field.name: getattr(node.launch, field.name) for field in attrs.fields(Launch)}
    changed = {f"launch.{name}": value for name, value in launch.items() if value != getattr(usual, name)}
    return {"op": node.op.name, **flat(unstructure(given)), **changed}
