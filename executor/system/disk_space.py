"""Disk space: what a folder uses, and what is free."""

from __future__ import annotations

import os
from pathlib import Path

from executor.system.symlinks import is_folder


def folder_size(path: Path) -> int:
    """Bytes of all files at or below a path. Links are not followed; files that vanish meanwhile count 0."""
    if not is_folder(path):
        return _size(str(path))
    return sum(_size(os.path.join(here, name)) for here, _, names in os.walk(path) for name in names)  # noqa: PTH118


def free_bytes(folder: Path) -> int:
    """Free disk at a folder, or at its nearest parent that exists; 0 where none can be read."""
    here = folder.absolute()
    for place in (here, *here.parents):
        try:
            status = os.statvfs(place)
        except OSError:
            continue
        return status.f_bavail * status.f_frsize
    return 0


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0
