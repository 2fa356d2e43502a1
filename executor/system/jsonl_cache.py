"""A cache in a JSON-lines file: it only saves time, so it may be lost or not writable."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsl.errors import StoreError
from dsl.files import replace_file
from dsl.json_files import append_line, compact, read_lines

SPARE_LINES = 1000


class Memo:
    """A cache in a file of JSON lines, to which it only appends; the newest line of a name counts. No path:
    no cache.
    """

    def __init__(self, path: Path | None, name: str, spare_lines: int = SPARE_LINES) -> None:
        self._path = path
        self._name = name
        self._spare_lines = spare_lines

    def newest(self) -> dict[str, dict[str, Any]]:
        """The valid lines by name; a file of mostly superseded lines is rewritten with only these."""
        if self._path is None:
            return {}
        lines = [line for line in read_lines(self._path) if self._name in line]
        valid = {line[self._name]: line for line in lines}
        if len(lines) > 2 * len(valid) + self._spare_lines:
            with suppress(OSError, StoreError):
                # Lines that another process appends meanwhile are lost, and computed again.
                replace_file(self._path, b"".join(map(compact, valid.values())))
        return valid

    def add(self, line: Mapping[str, Any]) -> None:
        if self._path is not None:
            with suppress(OSError, StoreError):
                append_line(self._path, line)
