"""The virtual environment of speculators: its own packages, with torch and transformers of the same versions."""

from __future__ import annotations

import os
import subprocess
import venv
from importlib.metadata import version
from pathlib import Path

SPECULATORS = "speculators==0.9.0"
PROBE = "from speculators.models.dflash import core"


def default_folder() -> Path:
    """The default folder of the environment: dflow/speculators-0.9.0 in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dflow" / SPECULATORS.replace("==", "-")


def interpreter(folder: Path) -> Path | None:
    """The Python interpreter of the environment in a folder, or None if it is not installed."""
    installed = any(folder.glob("lib/python*/site-packages/speculators/models/dflash/core.py"))
    return folder / "bin" / "python" if installed else None


def install(folder: Path) -> None:
    """Create the environment in a folder, which takes a few minutes and 1 GB. Raises CalledProcessError if pip fails.

    torchvision and torchaudio, which speculators requires but its DFlash model does not use, are uninstalled: the
    published wheels are CUDA builds, and transformers fails to import beside them on a CPU torch.
    """
    venv.create(folder, with_pip=True, clear=True)
    python = str(folder / "bin" / "python")
    ours = [f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "transformers", "safetensors")]
    subprocess.run([python, "-m", "pip", "install", "--quiet", SPECULATORS, *ours], check=True)
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio"], check=True)
    subprocess.run([python, "-c", PROBE], check=True)
