"""Disk space that a folder uses."""

from __future__ import annotations

import os
from pathlib import Path

from executor.system.symlinks import is_folder


def folder_size(path: Path) -> int:
    """Bytes of all files at or below a path. Links are not followed; files that vanish during the count
    have 0 bytes.
    """
    if not is_folder(path):
        return _size(str(path))
    return sum(_size(os.path.join(here, name)) for here, _, names in os.walk(path) for name in names)  # noqa: PTH118


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0
