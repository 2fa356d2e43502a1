"""How this machine saw artifacts: seen.jsonl among the store's memos, which lie with the user.

Append-only: digest, and a hash of the sizes, times and inodes of the artifact's files as they were when it was
committed or checked here. A file that is written afterwards has other times.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import attrs

from dsl.artifact_digest import MANIFEST
from executor.system.jsonl_cache import Memo
from executor.system.stamps import Stamp
from executor.system.symlinks import plain_status

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
