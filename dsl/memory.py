"""The memory that a process of this machine may take: the machine's, or that of its container.

A container's limit and use are those of its control group, in version 2 or 1 of the kernel's interface
(https://docs.kernel.org/admin-guide/cgroup-v2.html). Files that the kernel may drop count as use there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
# A group's files in versions 2 and 1: its limit, its use, its statistics.
FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
DROPPABLE = "inactive_file"


def machine_memory() -> int:
    """Bytes of memory of this machine, or of this process's container."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *(limit for limit, _ in _of_container())])


def free_memory() -> int:
    """Bytes of memory that are free, or can be freed, on this machine and in this process's container."""
    lines = _read(MEMINFO).splitlines()
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*(available or [machine_memory()]), *(max(0, limit - used) for limit, used in _of_container())])


def _of_container() -> Iterator[tuple[int, int]]:
    """The limit of a container's memory, and what of it is in use; nothing without a limit."""
    for limit, current, statistics in FILES:
        most, used = (_read(CGROUP / name).strip() for name in (limit, current))
        if most.isdecimal():
            counts = dict(line.split() for line in _read(CGROUP / statistics).splitlines())
            yield int(most), max(0, int(used or 0) - int(counts.get(DROPPABLE, 0)))


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
