"""Where torch keeps what it has compiled, for all stages of this user.

torch unpickles what it finds there. Its own place, <temporary folder>/torchinductor_<user>, can be made beforehand by
any user of the machine, who would run code in every stage that compiles.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # Triton's cache lies below, where TRITON_CACHE_DIR is not set
MODE = 0o700


def compile_cache() -> dict[str, str]:
    """The variable that names the folder; what the user has chosen counts."""
    return {VARIABLE: os.environ.get(VARIABLE) or str(_own_folder())}


@functools.cache
def _own_folder() -> Path:
    """In the user's cache folder, else one that lives as long as the machine leaves it."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    try:
        caches = Path(chosen) if Path(chosen).is_absolute() else Path.home() / ".cache"
        folder = caches / "dflow" / "compiled"
        folder.mkdir(mode=MODE, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except (OSError, RuntimeError):  # no home, or none that can be written to
        pass
    return Path(tempfile.mkdtemp(prefix="dflow-compiled-"))  # of mode 0700
