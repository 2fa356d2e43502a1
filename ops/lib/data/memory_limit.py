"""A limit of the memory that a piece of work may add: for files that unpack to far more than their size."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
STATM = Path("/proc/self/statm")


@contextmanager
def memory_limit(additional: int) -> Iterator[None]:
    """Within it, this process gets MemoryError for address space beyond what it has and `additional` bytes.

    The kernel limits the whole process, so use it only where no other thread works: that one could get the error.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if not STATM.is_file():  # not Linux
        yield
        return
    limit = int(STATM.read_text().split()[0]) * PAGE + additional
    for lower in (soft, hard):
        limit = limit if lower == resource.RLIM_INFINITY else min(limit, lower)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
