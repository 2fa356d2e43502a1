"""A value that is given as a bare text, on the command line or in an environment variable."""

from __future__ import annotations

import types
import typing
from typing import Any

import tomli

from dsl.convert import type_mistake
from dsl.toml import refused_values

OPENINGS = ('"', "'", "[", "{")


def typed_value(text: str, expected: Any) -> Any:
    """The text as TOML, or as it is where it is none: a bare word. `none` is None where the type has that.

    Raises ValueError for a text that begins as a quoted TOML string, a list or a table and is none.
    """
    if text == "none" and type_mistake(expected, None) is None:
        return None
    try:
        document = tomli.loads(f"value = {text}")
    except ValueError as error:
        if text.startswith(OPENINGS):
            reason = getattr(error, "msg", str(error))
            raise ValueError(f"not TOML: {reason}; a text in a list stands in quotes, as in TOML") from error
        return text
    if len(document) > 1:
        return text
    for _path, message in refused_values(document):
        raise ValueError(message)
    return document["value"]


def member_type(expected: Any, container: type) -> Any:
    """What the members of a list (tuple) or table (dict) of this type are; str where it is neither."""
    for choice in _choices(expected):
        if typing.get_origin(choice) is container:
            return typing.get_args(choice)[0 if container is tuple else 1]
    return str


def takes_table(expected: Any) -> bool:
    return any(typing.get_origin(choice) is dict for choice in _choices(expected))


def _choices(expected: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(expected) in (typing.Union, types.UnionType)
    return typing.get_args(expected) if is_union else (expected,)
