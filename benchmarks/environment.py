"""The virtual environment in which speculators runs: its own packages, the same torch and transformers as ours.

install(folder)        makes it, by pip from PyPI
interpreter(folder)    its Python, or None where it was not installed
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

SPECULATORS = "speculators==0.9.0"
PROBE = "from speculators.models.dflash import core"


def default_folder() -> Path:
    """dflow/speculators-0.9.0 in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "dflow" / SPECULATORS.replace("==", "-")


def install(folder: Path) -> None:
    """Make the environment; a few minutes, about 1 GB. Raises CalledProcessError where pip fails.

    torchvision and torchaudio, which speculators names but its DFlash model does not use, are taken out again: the
    published wheels are CUDA builds, and transformers fails to import beside them on a CPU torch.
    """
    venv.create(folder, with_pip=True, clear=True)
    python = str(_python(folder))
    ours = [f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "transformers", "safetensors")]
    subprocess.run([python, "-m", "pip", "install", "--quiet", SPECULATORS, *ours], check=True)
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio"], check=True)
    subprocess.run([python, "-c", PROBE], check=True)


def interpreter(folder: Path) -> Path | None:
    """The environment's Python, or None where nothing is installed."""
    installed = any(folder.glob("lib/python*/site-packages/speculators/models/dflash/core.py"))
    return _python(folder) if installed else None


def _python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
