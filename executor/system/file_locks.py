"""Locks by flock, which end with the process that holds them; and the one lock of a whole store, shared by processes
that start to use artifacts, exclusive for one that removes some.

<store>/gc.lock     flock. Shared while a run decides to use artifacts, until its record names them, and while an
                    artifact is placed and entered into the index. Exclusive while `dflow gc` determines what is in use
                    and renames the rest, while `dflow rm` removes a record, and while a tag changes. Each holds it
                    only briefly.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO

from dsl.files import clear_errors, open_own
from executor.system.output import print_lines

TAKE_WITHIN_S = 1.0
POLL_S = 0.02


def take(descriptor: int, kind: int) -> bool:
    """Take a lock, and return whether that succeeded. Retries briefly, since `is_held` elsewhere locks too."""
    deadline = time.monotonic() + TAKE_WITHIN_S
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        else:
            return True


def is_held(lock: Path, *, exclusive: bool = True) -> bool:
    """Whether a process holds this lock, exclusively (`exclusive`) or at all; False where the file does not exist."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # does not wait for a pipe's writer
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            raise
        return False  # a link is no lock
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if exclusive else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_exclusive(first: IO[bytes], second: IO[bytes]) -> bool:
    """Whether file locks work: a lock through one descriptor must exclude the other. Raises OSError if unsupported."""
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # by `first`, or by another process in this function
        return True
    return False


LOCK = "gc.lock"


def shared_gc_lock(store: Path) -> AbstractContextManager[None]:
    """A lock within which no artifact is removed; may be nested."""
    return _locked(store, fcntl.LOCK_SH)


def exclusive_gc_lock(store: Path) -> AbstractContextManager[None]:
    """A lock within which no process starts to use an artifact or adds to the index. Prints a line if it waits."""
    return _locked(store, fcntl.LOCK_EX)


@contextmanager
def _locked(store: Path, kind: int) -> Iterator[None]:
    with clear_errors(store / LOCK):
        descriptor = open_own(store / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if kind == fcntl.LOCK_EX:  # a shared lock is waited for only briefly
                print_lines("waiting: a run reads what the store holds", error=True)
            fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)
