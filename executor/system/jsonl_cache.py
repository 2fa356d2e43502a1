"""A file that remembers what was worked out once: only ever a help, so it may be lost or not writable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsl.errors import StoreError
from executor.system.jsonlines import append_line, compact, read_lines
from executor.system.symlinks import new_file

SPARE_LINES = 1000


class Memo:
    """Append-only JSON lines, of which the newest with the same name holds. Without a path nothing is remembered."""

    def __init__(self, path: Path | None, name: str, spare_lines: int = SPARE_LINES) -> None:
        self._path = path
        self._name = name
        self._spare_lines = spare_lines

    def newest(self) -> dict[str, dict[str, Any]]:
        """The lines that hold, by name; a file of which most lines no longer do is rewritten with them alone."""
        if self._path is None:
            return {}
        lines = [line for line in read_lines(self._path) if self._name in line]
        held = {line[self._name]: line for line in lines}
        if len(lines) > 2 * len(held) + self._spare_lines:
            with suppress(OSError, StoreError):
                self._rewrite(self._path, held)
        return held

    def add(self, line: Mapping[str, Any]) -> None:
        if self._path is not None:
            with suppress(OSError, StoreError):
                append_line(self._path, line)

    @staticmethod
    def _rewrite(path: Path, held: Mapping[str, Mapping[str, Any]]) -> None:
        """What another process appends meanwhile is lost, and worked out once more."""
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        with new_file(fresh) as file:
            file.writelines(map(compact, held.values()))
        fresh.replace(path)
