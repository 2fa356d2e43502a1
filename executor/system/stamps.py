"""A cheap test that a file is unchanged: size, times and inode, as the file system keeps them; and what is remembered
of files under such a stamp, in caches of JSON lines that only save time: they may be lost, or not writable.

ctime is set by the kernel at every write, so an edit that resets mtime is noticed too. Clocks have
limited resolution, though: two edits of the same size within it leave the same stamp. So facts about a file changed
a moment ago, or in the future by a clock that jumped, must not be cached under its stamp.

seen.jsonl among the store's memos, which lie with the user, says how this machine saw artifacts: digest, and a hash of
the stamps of the artifact's files as they were when it was committed or checked here. A file that is written
afterwards has other times.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from dsl.artifact_digest import MANIFEST
from dsl.errors import StoreError
from dsl.files import append_line, compact, read_lines, replace_file
from executor.system.symlinks import plain_status

SETTLED_AFTER_NS = 2_000_000_000  # FAT's resolution of two seconds, the coarsest in use


@frozen
class Stamp:
    """A file's size in bytes, times in nanoseconds since 1970, and inode."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """The stamp of a file, following links. Raises OSError."""
        return cls.of_status(path.stat())

    @classmethod
    def of_status(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def is_settled(stamp: Stamp, now: float) -> bool:
    """Whether any later edit of a file must change its stamp. now: seconds since 1970, read before the stamp."""
    return max(stamp.mtime_ns, stamp.ctime_ns) < int(now * 1e9) - SETTLED_AFTER_NS


SPARE_LINES = 1000


class Memo:
    """A cache in a file of JSON lines, to which it only appends; the newest line of a name counts. No path:
    no cache.
    """

    def __init__(self, path: Path | None, name: str) -> None:
        self._path = path
        self._name = name

    def newest(self) -> dict[str, dict[str, Any]]:
        """The valid lines by name; a file of mostly superseded lines is rewritten with only these."""
        if self._path is None:
            return {}
        lines = [line for line in read_lines(self._path) if self._name in line]
        valid = {line[self._name]: line for line in lines}
        if len(lines) > 2 * len(valid) + SPARE_LINES:
            with suppress(OSError, StoreError):
                # Lines that another process appends meanwhile are lost, and computed again.
                replace_file(self._path, b"".join(map(compact, valid.values())))
        return valid

    def add(self, line: Mapping[str, Any]) -> None:
        if self._path is not None:
            with suppress(OSError, StoreError):
                append_line(self._path, line)


SEEN = "seen.jsonl"


class SeenStamps:
    """The stamps of artifacts as this machine saw them. memos: the folder of the store's memos; without one every
    artifact is new.
    """

    def __init__(self, memos: Path | None) -> None:
        self._memo = Memo(None if memos is None else memos / SEEN, "digest")

    def newest(self) -> dict[str, str]:
        """The newest stamps of artifacts, by digest."""
        return {digest: str(line.get("stamps")) for digest, line in self._memo.newest().items()}

    def add(self, digest: str, stamps: str) -> None:
        self._memo.add({"digest": digest, "stamps": stamps})


def stamps_of(folder: Path, names: Iterable[str]) -> str:
    """A hash of the stamps of an artifact's folder and files. Raises OSError."""
    hashed = hashlib.sha256()
    for name in sorted({*names, MANIFEST}):
        stamp = Stamp.of_status(plain_status(folder, name))
        hashed.update(json.dumps([name, *attrs.astuple(stamp)]).encode(errors="backslashreplace") + b"\n")
    return hashed.hexdigest()
