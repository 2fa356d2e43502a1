"""Lines of JSON that somebody else may have written: no line is read further than it may be long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

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
    """The lines of a file, numbered from 1. Of a line with more than `longest` bytes only longest + 1 bytes come.

    A reader must stop at such a line.
    """
    with path.open("rb") as file:
        yield from lines_of(file, longest)


def lines_of(file: BinaryIO, longest: int) -> Iterator[tuple[int, bytes]]:
    """The lines of an open file, as `bounded_lines` gives them."""
    return enumerate(iter(partial(file.readline, longest + 1), b""), start=1)


def json_kind(value: Any) -> str:
    """The JSON name of a value's type; for types that JSON lacks, such as bytes, Python's name."""
    return KINDS.get(type(value), type(value).__name__)


def what_is_broken(error: json.JSONDecodeError) -> str:
    """The message of a JSON error, without a last "at" or "starting at", after which a place would follow."""
    return error.msg.removesuffix(" at").removesuffix(" starting")


def parse_line(line: bytes) -> tuple[Any, str]:
    """The value of a JSON line and "", or None and the mistake in it."""
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
