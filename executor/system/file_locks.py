"""What is asked of locks by flock, which end with the process that holds them."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO

ASKS_WITHIN_S = 1.0
POLL_S = 0.02


def take(descriptor: int, kind: int) -> bool:
    """Whether the lock could be had. Who asks `is_held` has it for a moment: that is waited for."""
    deadline = time.monotonic() + ASKS_WITHIN_S
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        else:
            return True


def is_held(lock: Path, *, alone: bool = True) -> bool:
    """Whether some process holds this lock, alone or at all; not where there is no such file."""
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if alone else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def keeps_others_out(first: IO[bytes], second: IO[bytes]) -> bool:
    """Whether a lock on a file that is open twice keeps the second out. Raises OSError where there are no locks."""
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # by `first`, or by another process that is asking the same
        return True
    return False
