"""Digests of artifacts, and whether an artifact still matches its own.

An artifact's digest is a function of its files' names, sizes and contents. `measurements.json` (seconds, speed-ups) and
`manifest.json` at its top are left out, since they differ between runs that computed the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from io import RawIOBase
from pathlib import Path

from attrs import frozen

from dsl.artifact_digest import DIGEST_START, OUTSIDE_DIGEST, digest_line
from dsl.errors import StageError
from dsl.files import sync
from executor.system.symlinks import plain_status

CHUNK = 1 << 20


@frozen
class FileEntry:
    """A file of an artifact: its size in bytes and the SHA-256 of its content in hex."""

    size: int
    sha256: str


def artifact_digest(files: Mapping[str, FileEntry]) -> str:
    """SHA-256 in hex over the sorted files (relative name with "/", size, SHA-256), measured files left out."""
    hashed = hashlib.sha256(DIGEST_START)
    for name in sorted(files):
        if name not in OUTSIDE_DIGEST:
            hashed.update(digest_line(name, files[name].size, files[name].sha256))
    return hashed.hexdigest()


def seal_artifact_files(folder: Path, go_on: Callable[[], None] = lambda: None) -> dict[str, FileEntry]:
    """Make every file below an out_dir read-only, sync it to disk, and return entries by relative name.

    The folder itself is not synced. go_on: called now and then; it may end the work by an error. Raises StageError for
    links and other special files.
    """
    files = {}
    for here, _, _ in os.walk(folder, topdown=False):
        with os.scandir(here) as entries:
            found = list(entries)
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                continue
            name = Path(entry.path).relative_to(folder).as_posix()
            if not _is_utf8(name):
                raise StageError(f"{name!a}: the op gave a file in out_dir a name that is not UTF-8; rename it")
            if not entry.is_file(follow_symlinks=False):
                raise StageError(
                    f"{name}: the op left something that is not a plain file in out_dir; copy files, do not link"
                )
            files[name] = _sealed(Path(entry.path), lambda _: go_on())
        if Path(here) != folder:
            sync(Path(here))
    return dict(sorted(files.items()))


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _sealed(path: Path, advance: Callable[[int], None]) -> FileEntry:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
        sha256 = sha256_of(file, advance)
        os.fchmod(file.fileno(), 0o444)
        os.fsync(file.fileno())
        return FileEntry(os.fstat(file.fileno()).st_size, sha256)


def altered_files(folder: Path, files: Mapping[str, FileEntry], go_on: Callable[[], None] = lambda: None) -> list[str]:
    """Names of an artifact's files that are missing or altered since the commit; reads them all.

    A link in place of a file, or of a folder of files, counts as altered.
    """
    altered = []
    for name, entry in files.items():
        try:
            plain_status(folder, name)
            with (folder / name).open("rb", buffering=0) as file:
                is_same = sha256_of(file, lambda _: go_on()) == entry.sha256
        except OSError:
            is_same = False
        if not is_same:
            altered.append(name)
    return altered


def sha256_of(file: RawIOBase, advance: Callable[[int], None]) -> str:
    """The SHA-256 in hex of an open file. advance: called with the bytes read since the last call."""
    hashed = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK))
    while size := file.readinto(buffer):
        hashed.update(buffer[:size])
        advance(size)
    return hashed.hexdigest()
