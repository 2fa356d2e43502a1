"""What the user trusts: the stores that the user made, or said `--trust` for, and the Ray clusters that the user used.

`trusted` in the state folder lists them, a line each: what it is, and the SHA-256 of what tells it from others. Of a
store that is its place and its id, so that one of somebody else is not taken for the one that lay there before. Where
the state folder cannot be written, what a command trusts holds for it and the processes that it starts.

A store of the user's own may do all that its records say. Any other one is only looked at: nothing is written there,
none of its op files is imported, and nothing of it is sent.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from dsl.errors import NotTrusted, StoreError
from dsl.files import append_line, compact, read_plain
from executor.system.user_cache import user_state

FILE = "trusted"
FOR_CHILDREN = "DFLOW_TRUSTED"  # SHA-256 of lines, by spaces
STORE = "store"
STORE_ID = ".id"
UNKNOWN_STORE = "not one that you made here, at this place"


def trust(what: str, content: str | bytes) -> None:
    """Remember that the user trusts a content. what: its kind."""
    if is_trusted(what, content):
        return
    line, folder = _line(what, content), user_state()
    if folder is not None:
        with suppress(StoreError):  # a full disk
            append_line(folder / FILE, line, durable=True)
            return
    os.environ[FOR_CHILDREN] = f"{os.environ.get(FOR_CHILDREN, '')} {_sha256(compact(line))}".strip()


def is_trusted(what: str, content: str | bytes) -> bool:
    folder, line = user_state(), compact(_line(what, content))
    file = None if folder is None else folder / FILE
    listed = file.read_bytes() if file is not None and file.exists() else b""
    return b"\n" + line in b"\n" + listed or _sha256(line) in os.environ.get(FOR_CHILDREN, "").split()


def trust_new_store(path: Path) -> None:
    """Give a new store its id, and trust it. If several processes do so, the first one's id counts."""
    fresh = path / f"{STORE_ID}.{os.getpid()}"
    fresh.write_text(os.urandom(16).hex())
    with suppress(OSError):  # it has one; or a file system without links, where the place alone has to do
        os.link(fresh, path / STORE_ID)
    fresh.unlink()
    trust_store(path)


def trust_store(path: Path) -> None:
    trust(STORE, _identity(path))


def is_own_store(path: Path) -> bool:
    """Whether the user made or trusts the store; True for a store that does not exist yet."""
    return not os.path.lexists(path / "format") or is_trusted(STORE, _identity(path))


def require_own_store(path: Path) -> None:
    """Check that the user made or trusts the store. Raises NotTrusted."""
    if not is_own_store(path):
        raise NotTrusted(f"the store {path} is {UNKNOWN_STORE}")


def _identity(store: Path) -> bytes:
    """The identity of a store: its path and id; stores of older versions have no id."""
    number = b""
    with suppress(OSError):
        number = read_plain(store / STORE_ID)
    return os.fsencode(os.path.realpath(store)) + number


def _line(what: str, content: str | bytes) -> dict[str, str]:
    data = content if isinstance(content, bytes) else content.encode(errors="surrogateescape")
    return {"what": what, "sha256": _sha256(data)}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
