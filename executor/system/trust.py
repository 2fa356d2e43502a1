"""What the user ran or trusted, `trusted` in the state folder: SHA-256 of a content and what it is, a line each.

A record that came from somebody else may name the same things; only what is listed here is used as the user's own.
Where the state folder cannot be written, what a command trusts holds for it and the processes that it starts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from dsl.errors import StoreError
from dsl.json_files import append_lines, compact
from executor.system.user_cache import user_state

FILE = "trusted"
FOR_CHILDREN = "DFLOW_TRUSTED"  # SHA-256 of lines, by spaces
TRACKING_URI = "tracking URI"
OP_FILE = "op file"
GRAPH = "graph"
STORE = "store"

Trusted = tuple[str, str | bytes]  # what it is, one of the above, and its content


def trust(contents: Iterable[Trusted]) -> None:
    """Remember them."""
    contents = list(contents)
    new = [entry for entry, known in zip(contents, are_trusted(contents), strict=True) if not known]
    folder = user_state()
    if new and folder is not None:
        try:
            append_lines(folder / FILE, list(map(_line, new)), durable=True)
            return
        except StoreError:  # a full disk
            pass
    for entry in new:
        os.environ[FOR_CHILDREN] = f"{os.environ.get(FOR_CHILDREN, '')} {_sha256(compact(_line(entry)))}".strip()


def are_trusted(contents: Iterable[Trusted]) -> list[bool]:
    """Whether each was remembered, by one reading."""
    folder = user_state()
    lines = _read(folder / FILE) if folder is not None else b""
    inherited = os.environ.get(FOR_CHILDREN, "").split()
    wanted = [compact(_line(entry)) for entry in contents]
    return [b"\n" + line in lines or _sha256(line) in inherited for line in wanted]


def is_trusted(what: str, content: str | bytes) -> bool:
    return are_trusted([(what, content)])[0]


def trust_store(path: Path) -> None:
    """Remember a store, by its place, as one that the user made or trusts."""
    trust([(STORE, os.fsencode(os.path.realpath(path)))])


def is_own_store(path: Path) -> bool:
    return is_trusted(STORE, os.fsencode(os.path.realpath(path)))


def _line(entry: Trusted) -> dict[str, str]:
    what, content = entry
    data = content if isinstance(content, bytes) else content.encode(errors="surrogateescape")
    return {"what": what, "sha256": _sha256(data)}


def _read(file: Path) -> bytes:
    try:
        return b"\n" + file.read_bytes()
    except FileNotFoundError:
        return b""


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
