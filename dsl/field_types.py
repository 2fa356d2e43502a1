"""The types of config fields: whether a value is of one, and how a user of TOML would call it."""

from __future__ import annotations

import types
import typing
from typing import Any

from dsl.errors import shortened
from dsl.shown import shown_value


def type_mistake(value: object, expected: Any) -> str | None:
    """Why `value` is not of type `expected`, or None where it is; strict: 1 is no bool, True no int.

    Knows bool, int, float (an int will do), str, None, Literal, unions, tuple[X, ...], dict[str, X], Any and classes.
    """
    origin = typing.get_origin(expected)
    arguments = typing.get_args(expected)
    if expected is Any:
        return None
    if origin in (typing.Union, types.UnionType):
        if any(type_mistake(value, member) is None for member in arguments):
            return None
    elif origin is typing.Literal:
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return None
        choices = ", ".join(shown_value(choice) for choice in arguments)
        return f"expected one of {choices}, got {shown_value(value)}"
    elif origin is tuple:
        if isinstance(value, tuple):
            members = ((place, type_mistake(member, arguments[0])) for place, member in enumerate(value, start=1))
            return next((f"member {place}: {mistake}" for place, mistake in members if mistake), None)
    elif origin is dict:
        if isinstance(value, dict):
            named = ((key, type_mistake(member, arguments[1])) for key, member in value.items())
            return next((f"{shortened(str(key))}: {mistake}" for key, mistake in named if mistake), None)
    elif expected is None or expected is type(None):
        if value is None:
            return None
    elif expected is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return None
    elif type(value) is expected or (isinstance(value, expected) and not isinstance(value, bool)):
        return None
    return f"expected {type_name(expected)}, got {shown_value(value)}"


def type_name(expected: Any) -> str:
    """The type as a user of TOML would say it: `int`, `float`, `str`, `list of int`, `int or none`."""
    origin = typing.get_origin(expected)
    arguments = typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(member) for member in arguments)
    if origin is typing.Literal:
        return "one of " + ", ".join(shown_value(choice) for choice in arguments)
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return f"table of {type_name(arguments[1])}"
    if expected is None or expected is type(None):
        return "none"
    return getattr(expected, "__name__", str(expected))
