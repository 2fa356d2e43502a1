"""The cache folder of torch's compiled code, shared by all stages of this user.

torch unpickles what it finds there. Its default, <temporary folder>/torchinductor_<user>, can be created in advance by
any user of the machine, who could then run code in every stage that compiles.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

from executor.system.user_cache import user_cache

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # Triton's cache lies below, where TRITON_CACHE_DIR is not set


def compile_cache() -> dict[str, str]:
    """The variable that names the folder; the user's own value takes precedence."""
    return {VARIABLE: os.environ.get(VARIABLE) or str(_own_folder())}


@functools.cache
def _own_folder() -> Path:
    """In the user's cache folder, else a temporary one of mode 0700."""
    return user_cache("compiled") or Path(tempfile.mkdtemp(prefix="dflow-compiled-"))
