"""How many bytes a folder holds."""

from __future__ import annotations

import os
from pathlib import Path


def folder_size(path: Path) -> int:
    """The sizes of all files at or below a path together; what vanishes meanwhile counts nothing."""
    if not path.is_dir():
        return _size(str(path))
    return sum(_size(os.path.join(here, name)) for here, _, names in os.walk(path) for name in names)  # noqa: PTH118


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0
