"""Paths that people write: whether they exist, and whether they lie in a store."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def is_there(path: Path, kind: Callable[[Path], bool] = Path.exists) -> bool:
    """Whether the path exists; False also for a name too long for the file system or a folder without permission."""
    try:
        return kind(path)
    except (OSError, ValueError):
        return False


def store_above(path: Path) -> Path | None:
    """The store in which a path lies, after following links; None outside of stores."""
    for folder in Path(os.path.realpath(path)).parents:
        if (folder / "format").is_file() and (folder / "objects").is_dir():
            return folder
    return None
