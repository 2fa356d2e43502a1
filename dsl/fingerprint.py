"""What enters a node's key from its config."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

from dsl.encoding import encode, fingerprint
from dsl.graph import GraphNode

__all__ = ["encode", "fingerprint", "key_config"]


def key_config(node: GraphNode) -> dict[str, object]:
    """The config as it enters the key: without neutral fields, edges and external paths.

    Edges and external paths enter by the digest of their content. An external field that names something built in,
    or a model id, enters by that name.
    """
    config = {}
    for field in node.op.fields.values():
        value = getattr(node.config, field.name)
        if field.neutral or (field.external and isinstance(value, str) and Path(value).is_absolute()):
            continue
        config[field.name] = _widened(value, field.type)
    return config


def _widened(value: Any, expected: Any) -> Any:
    """An int where the field is a float becomes one, so that `lr = 1` and `lr = 1.0` are the same key."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin is tuple and isinstance(value, (tuple, list)):
        return tuple(_widened(member, arguments[0]) for member in value)
    if origin is dict and isinstance(value, dict):
        return {key: _widened(member, arguments[1]) for key, member in value.items()}
    members = arguments if origin in (typing.Union, types.UnionType) else (expected,)
    if type(value) is int and float in members and int not in members:
        return float(value)
    return value
