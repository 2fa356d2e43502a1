"""The user's cache folder: `$XDG_CACHE_HOME/dflow`, else `~/.cache/dflow`.

Only the user can write to it. Files in a store can be forged by anyone who may write to the store, and files in the
temporary folder by any user of the machine.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

MODE = 0o700
OTHERS = stat.S_IWGRP | stat.S_IWOTH


def user_cache(*names: str) -> Path | None:
    """The folder of these names in the user's cache, created where it is missing; None where it is not writable."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    try:
        caches = Path(chosen) if Path(chosen).is_absolute() else Path.home() / ".cache"
        folders = [caches.joinpath("dflow", *names[:count]) for count in range(len(names) + 1)]
        for folder in folders:
            folder.mkdir(mode=MODE, parents=True, exist_ok=True)
        is_own = all(map(_is_own, folders))
    except (OSError, RuntimeError):  # no home, or none that can be written to
        return None
    return folders[-1] if is_own and os.access(folders[-1], os.W_OK | os.X_OK) else None


def _is_own(folder: Path) -> bool:
    """Whether nobody else can write there."""
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & OTHERS
