"""Who serves a run counts as its user: nothing that the run made is removed meanwhile.

<record>/serving-<process>    flock of a process that serves the run
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from executor.store.gc_lock import artifacts_taken
from executor.system.file_locks import is_held
from executor.system.os_errors import clear_errors
from executor.system.symlinks import links_in, open_own, refuse_links


@contextmanager
def serving(store: Path, record: Path) -> Iterator[None]:
    """From the moment that this is entered, `dflow gc` keeps the run; one that is collecting is waited for.

    Raises StoreError where a link is in the record.
    """
    lock = record / f"serving-{os.getpid()}"
    with artifacts_taken(store), clear_errors(lock):
        refuse_links(links_in(record))
        descriptor = open_own(lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def is_served(record: Path) -> bool:
    """Whether somebody serves the run of this record."""
    return any(is_held(lock) for lock in record.glob("serving-*"))
