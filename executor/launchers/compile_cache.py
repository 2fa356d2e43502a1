"""Where torch keeps what it has compiled, for all stages of this user.

torch unpickles what it finds there. Its own place, <temporary folder>/torchinductor_<user>, can be made beforehand by
any user of the machine, who would run code in every stage that compiles.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

from executor.system.user_cache import user_cache

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # Triton's cache lies below, where TRITON_CACHE_DIR is not set


def compile_cache() -> dict[str, str]:
    """The variable that names the folder; what the user has chosen counts."""
    return {VARIABLE: os.environ.get(VARIABLE) or str(_own_folder())}


@functools.cache
def _own_folder() -> Path:
    """In the user's cache folder, else one of mode 0700 that lives as long as the machine leaves it."""
    return user_cache("compiled") or Path(tempfile.mkdtemp(prefix="dflow-compiled-"))
