"""How values are shown: as TOML writes them; in mistakes with their type, and never at full length. Amounts of bytes,
as people write and read them.
"""

from __future__ import annotations

import json
import re
from typing import Any

from dsl.errors import ConfigError, shortened

MOST_MEMBERS = 8
PLAIN_TEXT = re.compile(r"(?!(?:true|false|inf|nan|none)$)[A-Za-z_./~@][\w./~@:+-]*")
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
KINDS = {"bool": "bool", "int": "int", "float": "float", "list": "list", "tuple": "list", "dict": "table"}


def shown_value(value: object) -> str:
    """The value with its type, for users: `8.7 (float)`, `true (bool)`, `"text"`, `[1, 2] (list)`, `none`.

    A reference is shown as its text.
    """
    kind = KINDS.get(type(value).__name__, type(value).__name__)
    is_clear = value is None or isinstance(value, str) or _is_reference(value)
    return _written(value) if is_clear else f"{_written(value)} ({kind})"


def toml_text(value: Any) -> str:
    """A value as TOML text for users, not shortened: `true`, `["a", "b"]`, `{ threads = 1 }`.

    Different values have different texts. A string that cannot be mistaken for another type has no quotes.
    """
    is_plain = isinstance(value, str) and PLAIN_TEXT.fullmatch(value)
    return value if is_plain else toml_value(value)


def toml_value(value: Any) -> str:
    """A value as a TOML file holds it, on one line; none, which TOML lacks, as `none`."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) or _is_reference(value):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        members = [
            f"{key if BARE_KEY.fullmatch(key) else toml_value(key)} = {toml_value(each)}" for key, each in value.items()
        ]
        return f"{{ {', '.join(members)} }}" if members else "{}"
    return str(value)


def _written(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str) or _is_reference(value):
        return shortened(json.dumps(str(value), ensure_ascii=False))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return shortened(str(value) if value.bit_length() < 1024 else hex(value))
    if isinstance(value, (tuple, list)):
        members = [_written(member) for member in value[:MOST_MEMBERS]]
        return shortened(f"[{', '.join([*members, *_more(len(value))])}]")
    if isinstance(value, dict):
        members = [f"{key} = {_written(member)}" for key, member in list(value.items())[:MOST_MEMBERS]]
        return shortened(f"{{ {', '.join([*members, *_more(len(value))])} }}") if members else "{}"
    return shortened(str(value))


def _more(count: int) -> list[str]:
    return [f"{count - MOST_MEMBERS} more"] if count > MOST_MEMBERS else []


def _is_reference(value: object) -> bool:
    """Whether a value is a Ref; compared by name, since Ref's module uses this one."""
    return type(value).__name__ == "Ref"


POWERS_OF_TEN = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
POWERS_OF_TWO = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
UNITS = POWERS_OF_TEN | POWERS_OF_TWO
SIZE = r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)"


def parsed_bytes(text: str) -> int:
    """The number of bytes in a size such as `24 GiB`, `1.5 TB` or `512MB`.

    KiB to TiB are powers of two, KB to TB powers of ten. Raises ConfigError for any other text, and for less than a
    byte.
    """
    found = re.fullmatch(SIZE, text.strip())
    if found is None or found[2].lower() not in UNITS:
        raise ConfigError(f'expected a number of bytes such as "24 GiB" or "24 GB", got "{shortened(text)}"')
    from fractions import Fraction

    size = int(Fraction(found[1]) * UNITS[found[2].lower()])
    if size < 1:
        raise ConfigError(f'expected at least one byte, got "{text}"')
    return size


def shown_bytes(size: float) -> str:
    """A number of bytes as text: `36.4 GB`, `2.7 MB`, `12,345 bytes`, `1,204.0 TB`; powers of ten, as disks
    are sold.
    """
    for unit, name in ((1e12, "TB"), (1e9, "GB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    if size < 100_000:
        return f"{size:,.0f} bytes"
    return f"{size / 1e6:.2g} MB" if size < 1e8 else f"{size / 1e6:.0f} MB"
