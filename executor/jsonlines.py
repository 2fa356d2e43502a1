"""Append-only files of JSON lines, and JSON files replaced as a whole; both survive a kill at any moment.

A line is one write() to a file opened with O_APPEND, so that several processes can write to one file. What a killed
process left half written is one broken line: the next writer ends it, and readers skip it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def append_line(path: Path, value: dict[str, Any], *, durable: bool = False) -> None:
    """Append one line; durable: return only when it is on disk."""
    line = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    is_new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        os.write(descriptor, line)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if durable and is_new:
        sync_folder(path.parent)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file; none where it is not there."""
    return LineReader(path).read()


class LineReader:
    """Reads the lines that were added since the last call; a last line without its end is left for later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [value for line in data[:end].splitlines() if (value := _parsed(line)) is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file as a whole: readers see the old one or the new one."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    fresh.replace(path)


def read_json(path: Path) -> Any:
    """The value of a JSON file, None where it is not there."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
