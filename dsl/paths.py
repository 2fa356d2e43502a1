"""Whether paths that people write exist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def is_there(path: Path, kind: Callable[[Path], bool] = Path.exists) -> bool:
    """Whether the path exists; False also for a name too long for the file system or a folder without permission."""
    try:
        return kind(path)
    except (OSError, ValueError):
        return False
