"""One lock for the whole store: shared by processes that start to use artifacts, exclusive for one that removes some.

<store>/gc.lock     flock. Shared while a run decides to use artifacts, until its record names them, and while an
                    artifact is placed and entered into the index. Exclusive while `dflow gc` determines what is in use
                    and renames the rest, while `dflow rm` removes a record, and while a tag changes. Each holds it
                    only briefly.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from dsl.files import clear_errors, open_own
from executor.system.output import print_lines

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
