"""speculators as a side: its virtual environment has its own packages, and torch and transformers as in ours."""

from __future__ import annotations

import argparse
import os
import subprocess
import venv
from importlib.metadata import version
from pathlib import Path

from benchmarks.harness import Side

SPECULATORS = "speculators==0.9.0"
PROBE = "from speculators.models.dflash import core"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "dflow" / SPECULATORS.replace("==", "-")
    parser.add_argument("--speculators-venv", type=Path, default=folder, metavar="FOLDER")
    parser.add_argument("--install-speculators", action="store_true", help="make that environment first, with pip")


def speculators_sides(arguments: argparse.Namespace) -> list[Side]:
    """The side, or none where it is not installed; `--install-speculators` installs it."""
    folder = arguments.speculators_venv
    if arguments.install_speculators:
        install(folder)
    installed = any(folder.glob("lib/python*/site-packages/speculators/models/dflash/core.py"))
    python = folder / "bin" / "python"
    return [Side("speculators", "benchmarks.sides.speculators_peer", python=python)] if installed else []


def install(folder: Path) -> None:
    """Make the environment; a few minutes, about 1 GB. Raises CalledProcessError where pip fails.

    torchvision and torchaudio, which speculators requires but its DFlash model does not use, are uninstalled: the
    published wheels are CUDA builds, and transformers fails to import beside them on a CPU torch.
    """
    venv.create(folder, with_pip=True, clear=True)
    python = str(folder / "bin" / "python")
    ours = [f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "transformers", "safetensors")]
    subprocess.run([python, "-m", "pip", "install", "--quiet", SPECULATORS, *ours], check=True)
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio"], check=True)
    subprocess.run([python, "-c", PROBE], check=True)
