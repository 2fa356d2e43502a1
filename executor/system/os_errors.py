"""What a file system refuses, said in one line: where, why, and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsl.errors import DflowError, DiskFull, StoreError

NO_SPACE = 74  # the exit code of a stage that could not write why it failed
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# Libraries that are not written in Python raise errors of their own, which quote the operating system's words.
FULL_WORDS = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
REFUSED = {
    errno.EROFS: "its file system is read-only; choose another --store (or DFLOW_STORE)",
    errno.EACCES: "this user has no permission; change that, or choose another --store (or DFLOW_STORE)",
    errno.EPERM: "this user has no permission; change that, or choose another --store (or DFLOW_STORE)",
    errno.ELOOP: "a symbolic link leads round in a circle there, or stands where dflow follows none",
    errno.ENOENT: "its folder is gone; was it removed while a run used it?",
}
# What a user can mend, wherever it comes up.
TOLD = FULL | {errno.EROFS, errno.EACCES, errno.EPERM}
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """Turns what the operating system says of a write at this path into DiskFull or StoreError."""
    try:
        yield
    except OSError as error:
        raise clear_error(error, path) from error


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """The same for a file that the user named, where no store is to blame. Raises DflowError."""
    if path.is_dir():
        raise DflowError(f"{path}: a folder; name a file")
    try:
        yield
    except OSError as error:
        no_folder = f"there is no folder {path.parent}: make it, or name another file"
        why = no_folder if error.errno == errno.ENOENT else error.strerror or str(error)
        raise DflowError(f"{path}: cannot be written: {why}") from error


def clear_error(error: OSError, path: Path) -> StoreError:
    """The StoreError, DiskFull where space is lacking, for what a file system refused at this path."""
    if error.errno in FULL:
        return DiskFull(full_at(path))
    return StoreError(f"{path}: cannot be used: {REFUSED.get(error.errno or 0, error.strerror or str(error))}")


def full_at(path: Path) -> str:
    """What a user does about a full disk."""
    return (
        f"disk full at {path} ({_left(path)} left): free space there, for example by `dflow gc`, "
        "or choose another --store; then `dflow resume`"
    )


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that a disk is full."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in FULL):
            return True
        if any(words in str(error) for words in FULL_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _left(path: Path) -> str:
    for place in (path, *path.parents):
        try:
            status = os.statvfs(place)
        except OSError:
            continue
        return _size(status.f_bavail * status.f_frsize)
    return "nothing is"


def _size(count: float) -> str:
    unit = 0
    while count >= 1024 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {UNITS[unit]}"
