"""Digests of files and folders: what an artifact is, and what external inputs hold.

An artifact's digest is a function of its files' names, sizes and contents. `measurements.json` (seconds, speed-ups) and
`manifest.json` at its top are left out, since they differ between runs that computed the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from stat import S_ISREG
from typing import Any

from attrs import frozen

from dsl.errors import DataError, StageError
from executor.jsonlines import append_line, read_lines

MANIFEST = "manifest.json"
MEASUREMENTS = "measurements.json"
MISSING = "missing"  # in the place of a digest


@frozen
class FileEntry:
    """A file of an artifact: its size in bytes and the SHA-256 of its content in hex."""

    size: int
    sha256: str


def artifact_digest(files: Mapping[str, FileEntry]) -> str:
    """SHA-256 in hex over the sorted files (relative name with "/", size, SHA-256), measured files left out."""
    hashed = hashlib.sha256(b"dflow artifact 1\n")
    for name in sorted(files):
        if name not in (MANIFEST, MEASUREMENTS):
            line = json.dumps([name, files[name].size, files[name].sha256])
            hashed.update(line.encode() + b"\n")
    return hashed.hexdigest()


def hash_artifact_files(folder: Path) -> dict[str, FileEntry]:
    """Every file under an out_dir by relative name, flushed to disk. Raises StageError for links and the like."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() and not path.is_symlink():
            continue
        if not S_ISREG(path.lstat().st_mode):
            raise StageError(
                f"{name}: the op left something that is not a plain file in out_dir; copy files, do not link"
            )
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
            files[name] = FileEntry(os.fstat(file.fileno()).st_size, sha256)
    return files


def altered_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Names of an artifact's files that are gone, or hold something else than when it was committed; reads them all."""
    altered = []
    for name, entry in manifest["files"].items():
        try:
            with (folder / name).open("rb") as file:
                is_same = hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"]
        except OSError:
            is_same = False
        if not is_same:
            altered.append(name)
    return altered


class ExternalDigests:
    """Content digests of files and folders outside the store, hashed once per (path, size, mtime, inode).

    The memo is an append-only file; without one (a store that is not there yet) everything is hashed anew.
    """

    def __init__(self, memo: Path | None) -> None:
        self._memo = memo
        self._known: dict[tuple[str, int, int, int], str] | None = None

    def of(self, path: Path) -> str:
        """The digest of a file's content, or of a folder's files by relative name. Raises DataError if it is gone."""
        if path.is_dir():
            files = {name: self._file(member) for name, member in _members(path)}
            return folder_digest(files)
        return self._file(path)

    def of_all(self, named: Mapping[str, Path | None]) -> str:
        """One digest of many files or folders by name; None is a name without a file. Raises DataError as `of` does."""
        return folder_digest({name: MISSING if path is None else self.of(path) for name, path in named.items()})

    def _file(self, path: Path) -> str:
        known = self._load()
        try:
            status = path.stat()
            identity = (str(path), status.st_size, status.st_mtime_ns, status.st_ino)
            if identity in known:
                return known[identity]
            with path.open("rb") as file:
                known[identity] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); it is an input of the pipeline") from error
        if self._memo is not None:
            entry = dict(zip(("path", "size", "mtime_ns", "inode"), identity, strict=True))
            append_line(self._memo, {**entry, "sha256": known[identity]})
        return known[identity]

    def _load(self) -> dict[tuple[str, int, int, int], str]:
        if self._known is None:
            lines = read_lines(self._memo) if self._memo is not None else []
            self._known = {
                (line["path"], line["size"], line["mtime_ns"], line["inode"]): line["sha256"] for line in lines
            }
        return self._known


def folder_digest(files: Mapping[str, str]) -> str:
    """SHA-256 in hex over the sorted (relative name, SHA-256 of the content, or MISSING) of an external folder."""
    hashed = hashlib.sha256(b"dflow folder 1\n")
    for name in sorted(files):
        hashed.update(json.dumps([name, files[name]]).encode() + b"\n")
    return hashed.hexdigest()


def _members(folder: Path) -> Iterator[tuple[str, Path]]:
    """Files below a folder with their relative names; links are followed, each real folder is entered once."""
    entered: set[str] = set()
    for here, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(here)
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        for name in names:
            path = Path(here) / name
            yield path.relative_to(folder).as_posix(), path
