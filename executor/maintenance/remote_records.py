"""What a remote says, checked: anybody may have written it, and this store would keep it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from dsl.errors import StoreError
from executor.store.artifact_store import IndexLine
from executor.store.digests import MANIFEST, FileEntry
from executor.store.names import DIGEST, RUN

NAME_BYTES = 255

Check = Callable[[Any], bool]


class NotAsExpected(StoreError):
    """A remote says something that no store of dflow says."""


def index_line(line: Mapping[str, Any]) -> IndexLine:
    """The line of an index. Raises NotAsExpected."""
    _require(line, LINE, needed=("digest", "run", "time"))
    return IndexLine.from_json(line)


def manifest_files(data: bytes, op: str | None) -> dict[str, FileEntry]:
    """The files that a manifest names; op: that of the node, None where it is not known. Raises NotAsExpected."""
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError):
        raise NotAsExpected("it is no JSON") from None
    if not isinstance(manifest, dict):
        raise NotAsExpected("it is no table")
    _require(manifest, MANIFEST_FIELDS, needed=tuple(MANIFEST_FIELDS))
    if op is not None and manifest["op"] != op:
        raise NotAsExpected(f'it is of the op "{manifest["op"]}", the node\'s is "{op}"')
    files = manifest["files"]
    for name, entry in files.items():
        wrong = _wrong_with_name(name)
        if wrong:
            raise NotAsExpected(f"the file name {name!r} {wrong}")
        if not isinstance(entry, dict) or entry.keys() != {"size", "sha256"}:
            raise NotAsExpected(f"{name}: size and sha256 are not what is told")
        _require(entry, ENTRY, needed=("size", "sha256"))
    clash = next(_folders_that_are_files(files), None)
    if clash is not None:
        raise NotAsExpected(f"{clash} is a file and a folder")
    return {name: FileEntry(**entry) for name, entry in files.items()}


def _require(values: Mapping[str, Any], checks: Mapping[str, Check], needed: tuple[str, ...]) -> None:
    for name in needed:
        if name not in values:
            raise NotAsExpected(f"{name} is missing")
    for name, check in checks.items():
        if name in values and not check(values[name]):
            raise NotAsExpected(f"{name} is {_shown(values[name])}")


def _wrong_with_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or not name or any(part in ("", ".", "..") for part in name.split("/")):
        return "leads out of the artifact, or nowhere"
    if name == MANIFEST:
        return "is kept for the store"
    try:
        is_long = any(len(part.encode()) > NAME_BYTES for part in path.parts)
    except UnicodeEncodeError:
        return "is no text"
    if is_long or "\0" in name:
        return "is none that a file can have"
    return ""


def _folders_that_are_files(files: Mapping[str, Any]) -> Iterator[str]:
    for name in files:
        yield from (str(folder) for folder in PurePosixPath(name).parents if str(folder) in files)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and DIGEST.fullmatch(value) is not None


def _is_run(value: Any) -> bool:
    return isinstance(value, str) and RUN.fullmatch(value) is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_time(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_figures(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _is_filled(value: Any) -> bool:
    return isinstance(value, dict) and bool(value)


def _is_key_parts(value: Any) -> bool:
    tables = ("code", "config", "external", "libraries")
    return (
        isinstance(value, dict)
        and isinstance(value.get("op"), str)
        and _is_count(value.get("version"))
        and all(isinstance(value.get(name), dict) for name in tables)
    )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


LINE: Mapping[str, Check] = {
    "digest": _is_digest,
    "run": _is_run,
    "time": _is_time,
    "neutral": _is_table,
    "acceptance": _is_text,
    "without_code": _is_text,
    "accepted_key": _is_text,
    "reason": _is_text,
    "user": _is_text,
    "source": _is_text,
}
MANIFEST_FIELDS: Mapping[str, Check] = {
    "files": _is_filled,
    "digest": _is_digest,
    "key": _is_digest,
    "op": _is_text,
    "node": _is_text,
    "run": _is_run,
    "key_parts": _is_key_parts,
    "inputs": _is_table,
    "metrics": _is_figures,
}
ENTRY: Mapping[str, Check] = {"size": _is_count, "sha256": _is_digest}
