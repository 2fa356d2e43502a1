"""A canonical, tagged encoding of plain values: equal bytes exactly for equal meaning.

    None, True, False, int, float, str, bytes      each with its own tag: 1, 1.0, True, "1" and b"1" all differ
    float                                          by its bits, so 0.0 and -0.0 differ; every nan is the same nan
    list, tuple                                    equal when their members are: TOML and JSON know only one of the two
    dict                                           without order
    Enum                                           class and member
    attrs classes                                  class, and the fields by name
    Encoded                                        the bytes of a value that was encoded before, by themselves

Anything else is refused; a Path too, since paths are content, not names.
"""

from __future__ import annotations

import hashlib
import math
import struct
from enum import Enum
from pathlib import PurePath
from typing import Any

import attrs
from attrs import frozen

from dsl.errors import ConfigError


@frozen
class Encoded:
    """The finished encoding of a value that occurs often; it stands in the value's place and is not computed again."""

    encoding: bytes


def fingerprint(value: object) -> str:
    """The SHA-256 of a value's encoding, in hex."""
    return hashlib.sha256(encode(value)).hexdigest()


def encode(value: object) -> bytes:
    """The canonical bytes of a value; no encoding is a prefix of another. Raises ConfigError for unsupported types."""
    if value is None:
        return b"n"
    if isinstance(value, Enum):
        return b"e" + encode(_class_name(value)) + encode(value.name)
    if type(value) is bool:
        return b"t" if value else b"f"
    if type(value) is int:
        return _sized(b"i", b"%x" % value)
    if type(value) is float:
        return b"d" + struct.pack(">d", math.nan if math.isnan(value) else value)
    if type(value) is str:
        return _sized(b"s", value.encode("utf-8", "surrogatepass"))
    if type(value) is bytes:
        return _sized(b"b", value)
    if type(value) in (list, tuple):
        members: Any = value
        return _counted(b"l", [encode(member) for member in members])
    if type(value) is dict:
        return _counted(b"m", sorted(encode(key) + encode(member) for key, member in value.items()))
    if type(value) is Encoded:
        return value.encoding
    if attrs.has(type(value)) and not isinstance(value, type):
        return b"a" + encode(_class_name(value)) + encode(attrs.asdict(value, recurse=False))  # type: ignore[arg-type]
    if isinstance(value, PurePath):
        raise ConfigError(f"{value}: a path cannot enter a key, since its name says nothing about its content")
    raise ConfigError(f"{value!r}: a {type(value).__name__} cannot enter a key")


def _sized(tag: bytes, payload: bytes) -> bytes:
    return tag + b"%d:" % len(payload) + payload


def _counted(tag: bytes, members: list[bytes]) -> bytes:
    return tag + b"%d:" % len(members) + b"".join(members)


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
