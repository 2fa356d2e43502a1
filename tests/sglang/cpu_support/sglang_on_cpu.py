"""What SGLang lacks on a machine without a GPU, put in place by hooks when its modules are imported.

platform_patches: for any model. The others add what one kind of model or the DFLASH worker needs beyond that.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from pathlib import Path

import attention_patches
import dflash_patches
import fp8_patches
import import_hooks
import moe_patches
import platform_patches
import qwen35_patches

FOLDER = Path(__file__).resolve().parent
PATCHES = (platform_patches, attention_patches, dflash_patches, qwen35_patches, moe_patches, fp8_patches)


def install(environment: MutableMapping[str, str]) -> None:
    """Patch this process, and every Python process that it starts with this environment."""
    # Compiling the vision tower's rotary embedding takes 9 to 30 s at its first call.
    environment["TORCHDYNAMO_DISABLE"] = "1"
    environment["OMP_NUM_THREADS"] = "1"
    paths = environment.get("PYTHONPATH", "").split(":")
    if str(FOLDER) not in paths:
        environment["PYTHONPATH"] = ":".join([str(FOLDER), *filter(None, paths)])
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    import_hooks.install()
