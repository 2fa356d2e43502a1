"""This machine: processors, memory, the compiler, and limits of the operating system."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from dsl.finding import Finding
from dsl.sizes import shown_bytes
from executor.system.hardware import machine_memory
from ops.lib.kernels.c_library import compiled_sweep

OPEN_FILES = 1024
SHARED_MEMORY = 1_000_000_000
SHARED = Path("/dev/shm")


def host_findings() -> Iterator[Finding]:
    cpus = len(os.sched_getaffinity(0))
    yield Finding(f"{cpus} CPUs, {shown_bytes(machine_memory())} of memory", level="good", code="machine")
    compiler, library = compiled_sweep()
    if library is not None:
        yield Finding(f"{compiler}: the loss on CPUs is compiled", level="good", code="C compiler")
    else:
        message = f"{compiler}: training on a CPU is slower, and torch.compile does not work"
        yield Finding(message, advice="install gcc or clang", code="C compiler")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        remedy = f"ulimit -n {OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)}"
        yield Finding(f"a process may open {soft}", advice=remedy, level="warning", code="open files")
    else:
        yield Finding(
            "unlimited" if soft == resource.RLIM_INFINITY else f"a process may open {soft:,}",
            level="good",
            code="open files",
        )
    yield _shared_memory()


def _shared_memory() -> Finding:
    try:
        size = shutil.disk_usage(SHARED).total
    except OSError:
        return Finding(
            f"{SHARED} does not exist", advice="several ranks on GPUs need it", level="warning", code="shared memory"
        )
    message = f"{shown_bytes(size)} at {SHARED}"
    if size < SHARED_MEMORY:
        remedy = "several ranks on GPUs, and SGLang, need more: `docker run --shm-size 8g`"
        return Finding(message, advice=remedy, level="warning", code="shared memory")
    return Finding(message, level="good", code="shared memory")
