"""The lock of a served run: gc removes nothing that the run uses while a server runs.

<record>/serving-<process>    flock of a process that serves the run
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsl.files import open_own
from dsl.os_errors import clear_errors
from executor.store.gc_lock import shared_gc_lock
from executor.system.file_locks import is_held
from executor.system.symlinks import links_in, refuse_links


@contextmanager
def serving(store: Path, record: Path) -> Iterator[None]:
    """Within this context `dflow gc` keeps the run; waits for a running gc first.

    Raises StoreError where a link is in the record.
    """
    lock = record / f"serving-{os.getpid()}"
    with shared_gc_lock(store), clear_errors(lock):
        refuse_links(links_in(record))
        descriptor = open_own(lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def is_served(record: Path) -> bool:
    """Whether the run of this record is being served."""
    return any(is_held(lock) for lock in record.glob("serving-*"))
