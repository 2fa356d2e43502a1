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

from dsl.errors import StoreError

MOVE_BACK = "replace the link by its target"


def is_folder(path: Path) -> bool:
    """Whether the path is a folder, not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def plain_status(folder: Path, name: str) -> os.stat_result:
    """The status of a regular file below a folder. name: relative, with "/".

    Raises OSError where it does not exist, and with ELOOP where it is no regular file or its path contains a link.
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
    """Whether a path is a regular file below a folder, reached without links below it and without `..`."""
    try:
        parts = path.absolute().relative_to(folder.absolute()).parts
        plain_status(folder, "/".join(parts))
    except (OSError, ValueError):
        return False
    return bool(parts) and ".." not in parts


def remove(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a folder and its contents, a file, or a link, never a link's target. Raises OSError."""
    if is_folder(path):
        import shutil

        shutil.rmtree(path, ignore_errors)  # which follows no link either, and unlinks those that it finds
        return
    with suppress(OSError) if ignore_errors else nullcontext():
        path.unlink(missing_ok=True)


def links_in(folder: Path) -> Iterator[Path]:
    """Every symbolic link at or below a path; links are not followed."""
    if folder.is_symlink():
        yield folder
        return
    for here, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(here, name)
            if path.is_symlink():
                yield path


def remove_links_out_of(folder: Path) -> None:
    """Remove all links below a folder that lead out of it; links within it stay."""
    inside = Path(os.path.realpath(folder))
    for link in links_in(folder):
        if not Path(os.path.realpath(link)).is_relative_to(inside):
            link.unlink()


def refuse_links(paths: Iterable[Path], instead: str = MOVE_BACK) -> None:
    """Check that none of the paths is a link. Raises StoreError for the first. instead: what to do about it."""
    for path in paths:
        if path.is_symlink():
            raise StoreError(
                f"{path} is a symbolic link to {path.readlink()}; dflow writes and deletes there, and follows no link: "
                f"{instead}"
            )


def folder_size(path: Path) -> int:
    """Bytes of all files at or below a path. Links are not followed; files that vanish during the count
    have 0 bytes.
    """
    if not is_folder(path):
        return _size(str(path))
    return sum(_size(os.path.join(here, name)) for here, _, names in os.walk(path) for name in names)  # noqa: PTH118


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0
