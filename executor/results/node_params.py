"""The parameters of a node: its config and launch as flat values."""

from __future__ import annotations

from typing import Any

import attrs

from dsl.graph import GraphNode
from dsl.launch import Launch
from dsl.op import Ref
from dsl.shown import toml_text


def params(node: GraphNode, *, edges: bool = True) -> dict[str, str]:
    """The values as texts: as TOML has them, but no quotes around a text."""
    return {
        name: value if isinstance(value, str) else toml_text(value) for name, value in values(node, edges=edges).items()
    }


def values(node: GraphNode, *, edges: bool = True) -> dict[str, Any]:
    """The flat config, and the launch values that are no defaults; edges: also the nodes that are read."""
    found: dict[str, Any] = {"op": node.op.name}
    for name in node.op.edges if edges else ():
        value = getattr(node.config, name)
        found |= {} if value is None else _flat(name, value)
    for name in node.op.fields:
        found |= _flat(name, getattr(node.config, name))
    usual = Launch()
    for field in attrs.fields(Launch):
        value = getattr(node.launch, field.name)
        if value != getattr(usual, field.name):
            found |= _flat(f"launch.{field.name}", value)
    return found


def _flat(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: each for part, member in value.items() for key, each in _flat(f"{name}.{part}", member).items()}
    return {name: str(value) if isinstance(value, Ref) else value}
