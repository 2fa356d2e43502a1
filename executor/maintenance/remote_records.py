"""Validation of data from a remote, which anybody may have written, before this store keeps it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, TypeVar

from dsl.convert import structure
from dsl.errors import StoreError, StructureError
from dsl.json_files import known_fields, parse_json
from dsl.shown import shown_value
from executor.store.digests import MANIFEST
from executor.store.index_line import IndexLine
from executor.store.manifest import Manifest
from executor.store.names import DIGEST, RUN

NAME_BYTES = 255
T = TypeVar("T")


class NotAsExpected(StoreError):
    """Data at a remote that no store of dflow writes."""


def index_line(line: Mapping[str, Any]) -> IndexLine:
    """The line of an index. Raises NotAsExpected."""
    made = _structured(lambda: structure(IndexLine, known_fields(IndexLine, line)))
    _require_names(made)
    if not math.isfinite(made.time):
        raise NotAsExpected(f"time: expected seconds, got {made.time}")
    return made


def pulled_manifest(data: bytes, op: str | None) -> Manifest:
    """The manifest in a file's bytes; op: that of the node, None where it is not known. Raises NotAsExpected."""
    try:
        values = parse_json(data)
    except ValueError:
        raise NotAsExpected("it is not JSON") from None
    manifest = _structured(lambda: Manifest.checked(values))
    _require_names(manifest)
    _require("key", manifest.key, DIGEST)
    if not manifest.files:
        raise NotAsExpected("files: must not be empty")
    if op is not None and manifest.op != op:
        raise NotAsExpected(f'its op is "{manifest.op}", but the node uses "{op}"')
    for name, entry in manifest.files.items():
        wrong = _wrong_with_name(name)
        if wrong:
            raise NotAsExpected(f"the file name {name!r} {wrong}")
        _require(f"{name}: sha256", entry.sha256, DIGEST)
        if entry.size < 0:
            raise NotAsExpected(f"{name}: size: expected 0 or more, got {entry.size}")
    clash = next(_folders_that_are_files(manifest.files), None)
    if clash is not None:
        raise NotAsExpected(f"{clash} is both a file and a folder")
    return manifest


def _structured(make: Callable[[], T]) -> T:
    try:
        return make()
    except StructureError as error:
        raise NotAsExpected("; ".join(map(str, error.mistakes[:3]))) from None


def _require_names(record: IndexLine | Manifest) -> None:
    _require("digest", record.digest, DIGEST)
    _require("run", record.run, RUN)


def _require(name: str, value: str, pattern: re.Pattern[str]) -> None:
    if not pattern.fullmatch(value):
        raise NotAsExpected(f"{name}: {shown_value(value)} does not match {pattern.pattern}")


def _wrong_with_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or not name or any(part in ("", ".", "..") for part in name.split("/")):
        return "points outside the artifact, or is empty"
    if name == MANIFEST:
        return "is reserved for the store"
    try:
        is_long = any(len(part.encode()) > NAME_BYTES for part in path.parts)
    except UnicodeEncodeError:
        return "is not valid UTF-8"
    if is_long or "\0" in name:
        return "is not a valid file name"
    return ""


def _folders_that_are_files(files: Mapping[str, Any]) -> Iterator[str]:
    for name in files:
        yield from (str(folder) for folder in PurePosixPath(name).parents if str(folder) in files)
