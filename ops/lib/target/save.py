"""Write a TargetModel artifact."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.lib.data.files import write_json

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
    """Copy the files of a folder that match one of the patterns; code and other weight formats stay behind."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def write_target_json(out_dir: Path, info: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Write target.json, which is what `describe_target` gives for the model, and metrics.json."""
    write_json(out_dir / "target.json", dict(info))
    write_json(out_dir / "metrics.json", dict(metrics))
