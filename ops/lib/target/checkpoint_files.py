"""The files of a checkpoint to download and to copy. Loads no torch."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsl.errors import DataError
from ops.lib.data.checkpoint_code import check_code, check_link
from ops.lib.data.files import read_object

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
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # by which a target's weights are loaded


def copy_files(source: Path, target: Path, patterns: Sequence[str]) -> None:
    """Copy the files of a folder that match the patterns, except code and other weight formats.

    Raises DataError for a link that leads out of the checkpoint, since it could copy a private file.
    """
    target.mkdir(parents=True, exist_ok=True)
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and (pattern in CODE or file.suffix not in RUNS):
                check_link(file, source)
                shutil.copyfile(file, target / file.name)


def weight_files(directory: Path) -> list[Path]:
    """The files whose tensors transformers would load: the single file, else the existing ones that the index names.

    Without both, all safetensors files. Raises DataError for an index that is no JSON object.
    """
    every = sorted(directory.glob("*.safetensors"))
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not (directory / INDEX).is_file():
        return every
    named = read_object(directory / INDEX).get("weight_map")
    used = set(named.values()) if isinstance(named, Mapping) else set()
    return [file for file in every if file.name in used]


def check_weights(directory: Path, kind: str = "target") -> None:
    """Check that a checkpoint has safetensors files, not just pickles. Raises DataError. kind: for the message."""
    if not any(directory.glob("*.safetensors")):
        pickles = sorted(file.name for file in directory.glob("*.bin"))
        remedy = "download the *.safetensors as well"
        if pickles:
            remedy = f"{pickles[0]} may run code when it is loaded: save it again by `save_pretrained` of transformers"
        raise DataError(
            f"{directory}: no *.safetensors in this {kind} directory, and other formats are not supported; {remedy}"
        )
    if not any((directory / name).is_file() for name in (SINGLE, INDEX)):
        raise DataError(
            f"{directory}: no {SINGLE} and no {INDEX}, by which a {kind}'s weights are loaded; rename a single file, "
            "or save the checkpoint again"
        )


def trusts_own_code(directory: Path, info: Mapping[str, Any]) -> bool:
    """Whether code of a checkpoint directory may run: there is some, and its target.json trusts it.

    Raises DataError as `check_code` does.
    """
    trusted = bool(info.get("trust_remote_code", False)) and any(directory.glob("*.py"))
    check_code(directory, trusted)
    return trusted
