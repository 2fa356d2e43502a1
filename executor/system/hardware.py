"""How much memory this machine has, and its GPUs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def machine_memory() -> int:
    """Bytes of this machine, or of the container that this process is in."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CGROUP_LIMIT.read_text().strip()
    except OSError:
        return whole
    return min(whole, int(limit)) if limit.isdecimal() else whole


def gpu_memory() -> int | None:
    """Bytes of the smallest of this machine's GPUs, as nvidia-smi says; None where it says nothing."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    sizes = [int(line) for line in said.split() if line.isdecimal()]
    return min(sizes) * 2**20 if sizes else None
