"""What stands at a path, for paths that people write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def is_there(path: Path, kind: Callable[[Path], bool] = Path.exists) -> bool:
    """Not there either: a name that is longer than a file system takes, a folder that nobody may look into."""
    try:
        return kind(path)
    except (OSError, ValueError):
        return False
