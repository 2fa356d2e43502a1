"""How ops write files: JSON with sorted keys, atomic writes, and links instead of copies."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def write_json(path: Path, data: object) -> None:
    """Indented UTF-8 JSON with sorted keys and a last newline; written atomically.

    Raises ValueError for nan and infinities, which JSON lacks: use None for a missing number.
    """
    text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    replace_file(path, (text + "\n").encode())


def read_json(path: Path) -> Any:
    """Raises JSONDecodeError also for JSON that is nested too deeply to be read."""
    text = path.read_text("utf-8")
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", text, 0) from None


def json_line(value: object) -> str:
    """One line of a JSONL file, with its newline. Raises ValueError as `write_json`."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    """One compact object with sorted keys a line."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json_line(row) for row in rows)


def read_jsonl(path: Path) -> Iterator[Any]:
    """The objects of a JSONL file; only a newline ends a line, not Unicode's other separators."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            yield json.loads(line)


def replace_file(path: Path, content: bytes) -> None:
    """Write beside the path, flush to disk, rename."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    finish_file(partial, path)


def finish_file(partial: Path, path: Path) -> None:
    """Flushes a written file to disk and renames it."""
    sync(partial)
    partial.replace(path)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link, or a copy if the file system has none. For files that are never changed again."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
