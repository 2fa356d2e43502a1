"""The files of a checkpoint to download and to copy. Loads no torch."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsl.errors import DataError
from ops.lib.data.checkpoint_code import check_code

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


PROCESSOR = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens*",
    "added_tokens*",
    "chat_template*",
    "*processor*.json",
)


CODE = ("*.py",)
RUNS = {".py", ".pyc", ".so", ".pkl", ".pickle", ".bin", ".pt", ".pth"}  # names of code and of pickles


CONFIGS = ("config.json", "generation_config.json")


def copy_files(source: Path, target: Path, patterns: Sequence[str]) -> None:
    """Copy the files of a folder that match one of the patterns; code and other weight formats are not copied.

    Raises DataError for a link that leads out of the checkpoint: a stranger's could bring a private file along.
    """
    target.mkdir(parents=True, exist_ok=True)
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and (pattern in CODE or file.suffix not in RUNS):
                _check_link(file)
                shutil.copyfile(file, target / file.name)


def _check_link(file: Path) -> None:
    """Weights may lie anywhere, since no private file can be read as safetensors. Hugging Face's cache has its files in
    blobs/, beside snapshots/<revision>/.
    """
    if not file.is_symlink() or file.suffix == ".safetensors":
        return
    folder, leads_to = file.parent.resolve(), file.resolve()
    own = [folder, *([folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else [])]
    if not any(leads_to.is_relative_to(place) for place in own):
        raise DataError(
            f"{file}: a link out of the checkpoint, to {leads_to}; replace it by the file if that belongs to it"
        )


def trusts_own_code(directory: Path, info: Mapping[str, Any]) -> bool:
    """Whether code of a checkpoint directory may run: its target.json says that the node which made it trusts it, and
    there is some. Raises DataError as `check_code`.
    """
    trusted = bool(info.get("trust_remote_code", False)) and any(directory.glob("*.py"))
    check_code(directory, trusted)
    return trusted
