"""This machine: processors, memory, the compiler, and limits of the operating system."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from dsl.sizes import shown_bytes
from executor.doctor.finding import Finding
from executor.system.hardware import machine_memory
from ops.lib.kernels.c_library import compiled_sweep

OPEN_FILES = 1024
SHARED_MEMORY = 1_000_000_000
SHARED = Path("/dev/shm")


def host_findings() -> Iterator[Finding]:
    cpus = len(os.sched_getaffinity(0))
    yield Finding("machine", "ok", f"{cpus} CPUs, {shown_bytes(machine_memory())} of memory")
    compiler, library = compiled_sweep()
    if library is not None:
        yield Finding("C compiler", "ok", f"{compiler}: the loss on CPUs is compiled")
    else:
        message = f"{compiler}: training on a CPU is slower, and torch.compile does not work"
        yield Finding("C compiler", "missing", message, "install gcc or clang")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        remedy = f"ulimit -n {OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)}"
        yield Finding("open files", "warning", f"a process may open {soft}", remedy)
    else:
        yield Finding(
            "open files", "ok", "unlimited" if soft == resource.RLIM_INFINITY else f"a process may open {soft:,}"
        )
    yield _shared_memory()


def _shared_memory() -> Finding:
    try:
        size = shutil.disk_usage(SHARED).total
    except OSError:
        return Finding("shared memory", "warning", f"{SHARED} does not exist", "several ranks on GPUs need it")
    message = f"{shown_bytes(size)} at {SHARED}"
    if size < SHARED_MEMORY:
        remedy = "several ranks on GPUs, and SGLang, need more: `docker run --shm-size 8g`"
        return Finding("shared memory", "warning", message, remedy)
    return Finding("shared memory", "ok", message)
