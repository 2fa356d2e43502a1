"""JSON as artifacts hold it: UTF-8, sorted keys, one object a line in JSONL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_json(file: Path, value: Any) -> None:
    """A JSON file of an artifact."""
    file.write_text(json.dumps(value, sort_keys=True, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def json_line(value: Any) -> str:
    """One line of a JSONL file, with its newline."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False) + "\n"


def read_json_lines(file: Path) -> Iterator[Any]:
    """The objects of a JSONL file; only a newline ends a line, not the other separators that Unicode knows."""
    with file.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield json.loads(line)
