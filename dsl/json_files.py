"""Append-only files of JSON lines, and JSON files replaced as a whole; both survive a kill at any moment.

Durable ones survive a crash of the machine too. Errors of the file system become StoreError or DiskFull.

A link, a folder, a pipe or a device in the place of a file is not read: it counts as a damaged file.

Lines are one write() to a file opened with O_APPEND, so that several processes can write to one file. The next writer
ends a line that a killed process left incomplete, and readers skip it.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from dsl.files import NO_FILE, open_own, open_plain, read_plain, replace_file, sync
from dsl.os_errors import clear_errors

LONGEST_LINE = 64 << 20  # bytes


def append_line(path: Path, value: Mapping[str, Any], *, durable: bool = False) -> None:
    """Append a value to a file as one line of JSON. durable: return only when it is on disk."""
    append_lines(path, [value], durable=durable)


def append_lines(path: Path, values: Iterable[Mapping[str, Any]], *, durable: bool = False) -> None:
    """Append values to a file as lines of JSON, in one write."""
    line = b"".join(compact(value) for value in values)
    with clear_errors(path):
        descriptor = open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            if os.write(descriptor, line) < len(line):  # a second write might not follow the first
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if durable:  # also for an existing file: its creator may have died before this
            sync(path.parent)


def compact(value: Any) -> bytes:
    """A value as one line of JSON with a line end, in UTF-8; a lone surrogate is escaped."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace") + b"\n"


def known_fields(cls: type[attrs.AttrsInstance], data: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a JSON object that are fields of the class; others, as of a newer dflow, are left out."""
    names = _field_names(cls)
    return {name: value for name, value in data.items() if name in names}


@cache
def _field_names(cls: type[attrs.AttrsInstance]) -> frozenset[str]:
    return frozenset(attrs.fields_dict(cls))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The values of all complete lines of a JSONL file; empty where it does not exist."""
    return LineReader(path).read()


class LineReader:
    """A reader of JSON lines: each call returns those appended since the last one, at first from an offset on.

    A last line without its end is read later. A line of more than LONGEST_LINE bytes is skipped as damaged. only: lines
    without this text are skipped unparsed.
    """

    def __init__(self, path: Path, offset: int = 0, *, only: re.Pattern[bytes] | None = None) -> None:
        self._path = path
        self._offset = offset
        self._only = only
        self._is_skipping = False

    def read(self) -> list[dict[str, Any]]:
        values = []
        try:
            with open_plain(self._path) as file:
                file.seek(self._offset)
                while line := file.readline(LONGEST_LINE):
                    has_end = line.endswith(b"\n")
                    if not has_end and len(line) < LONGEST_LINE:
                        break
                    self._offset += len(line)
                    is_wanted = has_end and not self._is_skipping and (self._only is None or self._only.search(line))
                    if is_wanted and (value := parsed_object(line)) is not None:
                        values.append(value)
                    self._is_skipping = not has_end
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            return []
        return values


def parse_json(text: bytes | str) -> Any:
    """Parse a JSON text. Raises JSONDecodeError, also for one nested too deeply, and UnicodeDecodeError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None


def parsed_object(text: bytes | str) -> dict[str, Any] | None:
    """The object in a JSON text; None where it holds something else, or is no JSON."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: Any, *, durable: bool = False, in_one_line: bool = False) -> None:
    """Replace a JSON file atomically. durable: so that it survives a crash of the machine.

    in_one_line: for large values that people seldom read; several times faster to write and read.
    """
    indented = json.dumps(value, indent=1, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
    replace_file(path, compact(value) if in_one_line else indented, durable=durable)


def read_json(path: Path) -> Any:
    """Read a JSON file; None where it does not exist. Raises ValueError for invalid JSON and for what is no
    plain file.
    """
    try:
        return parse_json(read_plain(path).decode())
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EFBIG):
            raise ValueError("not a plain file" if error.errno == errno.ELOOP else error.strerror) from None
        if error.errno not in NO_FILE:
            raise
        return None


def read_object(path: Path) -> dict[str, Any] | None:
    """Read the object in a JSON file; None where the file is missing, damaged, or holds anything else."""
    try:
        value = read_json(path)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
