"""The files of a checkpoint to download and to copy."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

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


CONFIGS = ("config.json", "generation_config.json")


def copy_files(source: Path, target: Path, patterns: Sequence[str]) -> None:
    """Copy the files of a folder that match one of the patterns; code and other weight formats are not copied."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)
