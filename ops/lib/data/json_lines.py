"""Lines of JSON that somebody else may have written: no line is read further than it may be long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

KINDS: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}
TOO_DEEP = "broken JSON: nested too deeply"


def bounded_lines(path: Path, longest: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, with their numbers from 1. Of one with more than `longest` bytes, only the beginning comes,
    which is a byte longer; its reader has to stop there.
    """
    with path.open("rb") as file:
        yield from enumerate(iter(partial(file.readline, longest + 1), b""), start=1)


def json_kind(value: Any) -> str:
    """What a value is in JSON; the name of its type for one that only tables have, such as bytes."""
    return KINDS.get(type(value), type(value).__name__)


def what_is_broken(error: json.JSONDecodeError) -> str:
    """The error's own words, some of which end where it would add the place: "Unterminated string starting at"."""
    return error.msg.removesuffix(" at").removesuffix(" starting")


def parse_line(line: bytes) -> tuple[Any, str]:
    """The value of a line, or the mistake in it."""
    try:
        return json.loads(line.decode("utf-8")), ""
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 at byte {error.start + 1}"
    except json.JSONDecodeError as error:
        return None, f"broken JSON at column {error.colno}: {what_is_broken(error)}"
    except ValueError as error:  # an integer of thousands of digits
        return None, f"broken JSON: {error}"
    except RecursionError:
        return None, TOO_DEEP
