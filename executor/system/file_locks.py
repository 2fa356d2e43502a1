"""Locks by flock, which end with the process that holds them."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import IO

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
