"""Checks of JSON values in a store, which may come from somebody else: each returns whether a value is of that kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from typing import Any

Check = Callable[[Any], bool]
LARGEST = 2**63
LAST_MOMENT = 10.0**11  # seconds since 1970: the year 5138, before what the C library can write as a date ends
ID = re.compile(r"\w[\w.-]{0,200}", re.ASCII)  # a part of a path: a digest, a key, a run
NODE_ID = re.compile(r"[A-Za-z][\w.+-]{0,240}", re.ASCII)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and abs(value) < LARGEST


def is_number(value: Any) -> bool:
    """Whether a value is a number: also nan and the infinities, but no int that no float can hold."""
    return isinstance(value, float) or is_whole(value)


def is_moment(value: Any) -> bool:
    return is_number(value) and 0 <= value < LAST_MOMENT


def is_id(value: Any) -> bool:
    return isinstance(value, str) and ID.fullmatch(value) is not None


def is_node_id(value: Any) -> bool:
    return isinstance(value, str) and NODE_ID.fullmatch(value) is not None


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_one_of(choices: Container[Any]) -> Check:
    return lambda value: isinstance(value, str) and value in choices


def or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def is_list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def is_table_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(is_text, value)) and all(map(check, value.values()))


def fit(checks: Mapping[str, Check], values: Mapping[str, Any]) -> bool:
    """Whether each value that has a check passes it."""
    return all(check(values[name]) for name, check in checks.items() if name in values)
