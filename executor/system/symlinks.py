"""Symbolic links in a store: their targets are never written or removed.

A link where dflow writes or deletes is removed itself. It is refused where a user may have moved data elsewhere on
purpose: a run's record, or a whole folder of the store. Other tools do the same: git refuses to clone a repository
whose objects are a link (CVE-2022-39253, CVE-2023-22490), Nix a store that is one.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO

from dsl.errors import StoreError

MODE = 0o644
LARGEST = 256 << 20  # bytes of a file that is read whole: dflow writes none so large
NO_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EFBIG})  # none of dflow's in its place
MOVE_BACK = "replace the link by its target"


def is_folder(path: Path) -> bool:
    """Whether the path is a folder, not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def plain_status(folder: Path, name: str) -> os.stat_result:
    """The status of a file below a folder; name: relative, with "/".

    Raises OSError where it does not exist, with ELOOP where it is no regular file or its path contains a link.
    """
    path = str(folder)
    parts = name.split("/")
    for part in parts[:-1]:
        path = f"{path}/{part}"
        if stat.S_ISLNK(os.lstat(path).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    path = f"{path}/{parts[-1]}"
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return status


def is_plain(path: Path, folder: Path) -> bool:
    """Whether the path is a regular file below a folder, by no link below it and by no `..`."""
    try:
        parts = path.absolute().relative_to(folder.absolute()).parts
        plain_status(folder, "/".join(parts))
    except (OSError, ValueError):
        return False
    return bool(parts) and ".." not in parts


def open_plain(path: Path) -> IO[bytes]:
    """A regular file opened for reading. Raises OSError: with ELOOP where a link or something else is in its place.

    A pipe is not waited for, and a device is not read.
    """
    return os.fdopen(_plain_descriptor(path)[0], "rb")


def read_plain(path: Path) -> bytes:
    """The content of a regular file. Raises OSError as `open_plain`, with EFBIG for more than LARGEST bytes."""
    descriptor, size = _plain_descriptor(path)
    data = b""
    try:
        while size <= LARGEST and (piece := os.read(descriptor, size + 1)):
            data += piece
            size = max(size, len(data))
    finally:
        os.close(descriptor)
    if size > LARGEST:
        raise OSError(errno.EFBIG, f"larger than {LARGEST >> 20} MiB", str(path))
    return data


def _plain_descriptor(path: Path) -> tuple[int, int]:
    """With the size of the file in bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return descriptor, status.st_size


def remove(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a folder and its contents, a file, or a link, never a link's target. Raises OSError."""
    if is_folder(path):
        import shutil

        shutil.rmtree(path, ignore_errors)  # which follows no link either, and unlinks those that it finds
        return
    with suppress(OSError) if ignore_errors else nullcontext():
        path.unlink(missing_ok=True)


def remove_link(path: Path) -> None:
    """Remove a link; anything else is kept, also a folder that another process puts in its place meanwhile."""
    if path.is_symlink():
        with suppress(FileNotFoundError, IsADirectoryError):
            path.unlink()


def links_in(folder: Path) -> Iterator[Path]:
    """Every link at or below a path, without following links."""
    if folder.is_symlink():
        yield folder
        return
    for here, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(here, name)
            if path.is_symlink():
                yield path


def remove_links_out_of(folder: Path) -> None:
    """Remove the links below a folder that lead out of it; others are kept."""
    inside = Path(os.path.realpath(folder))
    for link in links_in(folder):
        if not Path(os.path.realpath(link)).is_relative_to(inside):
            link.unlink()


def refuse_links(paths: Iterable[Path], instead: str = MOVE_BACK) -> None:
    """Raises StoreError for the first of these paths that is a link. instead: what to do about it."""
    for path in paths:
        if path.is_symlink():
            raise StoreError(
                f"{path} is a symbolic link to {path.readlink()}; dflow writes and deletes there, and follows no link: "
                f"{instead}"
            )


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a file that is dflow's own; a link in its place is removed first. Raises OSError."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, MODE)
    except OSError as error:
        if error.errno != errno.ELOOP or not path.is_symlink():
            raise
    remove_link(path)
    return os.open(path, flags | os.O_NOFOLLOW, MODE)


def appended(path: Path) -> IO[bytes]:
    """A file of dflow opened for appending, created where it is missing; see `open_own`."""
    return os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def new_file(path: Path) -> IO[bytes]:
    """A new file that replaces whatever was there: a link is removed, not written through. Raises OSError."""
    path.unlink(missing_ok=True)
    return path.open("xb")
