"""Errors of the file system in one line: where, why, and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsl.errors import DflowError, DiskFull, StoreError
from dsl.sizes import shown_bytes

NO_SPACE = 74  # the exit code of a stage that could not write why it failed
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# Libraries not written in Python raise errors of their own, which quote the operating system's message.
FULL_MESSAGES = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
REFUSED = {
    errno.EROFS: "its file system is read-only; choose another --store (or DFLOW_STORE)",
    errno.EACCES: "this user has no permission; change that, or choose another --store (or DFLOW_STORE)",
    errno.EPERM: "this user has no permission; change that, or choose another --store (or DFLOW_STORE)",
    errno.ELOOP: "symbolic links form a loop there, or there is a link where dflow follows none",
    errno.ENOENT: "its folder is gone; was it removed while a run used it?",
}
# Errors that a user can fix, wherever they occur.
USER_ERRNOS = FULL | {errno.EROFS, errno.EACCES, errno.EPERM}


@contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """Open a context that turns an OSError from writing at this path into DiskFull or StoreError."""
    try:
        yield
    except OSError as error:
        raise clear_error(error, path) from error


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """Open a context that turns an OSError about a user's file outside the store into a DflowError."""
    if path.is_dir():
        raise DflowError(f"{path}: is a folder; give a file")
    try:
        yield
    except OSError as error:
        no_folder = f"there is no folder {path.parent}; create it, or give another file"
        why = no_folder if error.errno == errno.ENOENT else error.strerror or str(error)
        raise DflowError(f"{path}: cannot be written: {why}") from error


def clear_error(error: OSError, path: Path) -> StoreError:
    """The StoreError, or DiskFull, that stands for an OSError at a path."""
    if error.errno in FULL:
        return DiskFull(full_at(path))
    return StoreError(f"{path}: cannot be used: {REFUSED.get(error.errno or 0, error.strerror or str(error))}")


def full_at(path: Path) -> str:
    """The message that the disk at a path is full."""
    return (
        f"disk full at {path} ({shown_bytes(free_bytes(path))} left): free space there, for example by `dflow gc`, "
        "or choose another --store; then `dflow resume`"
    )


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one in its chain of causes, means that a disk is full."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in FULL):
            return True
        if any(words in str(error) for words in FULL_MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder, or of its nearest existing parent; 0 where that cannot be read."""
    here = folder.absolute()
    for place in (here, *here.parents):
        try:
            status = os.statvfs(place)
        except OSError:
            continue
        return status.f_bavail * status.f_frsize
    return 0
