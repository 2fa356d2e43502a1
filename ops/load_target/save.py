"""Write a TargetModel artifact."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ops.files import write_json
from ops.load_target.model import describe_target

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
CONFIGS = ("config.json", "generation_config.json")


def copy_files(source: Path, target: Path, patterns: Sequence[str]) -> None:
    """Copy the files of a folder that match one of the patterns; code and other weight formats stay behind."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in patterns:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def write_target_json(
    out_dir: Path, mask_token_id: int | None, eos_token_ids: Sequence[int], metrics: Mapping[str, float]
) -> None:
    """Describe out_dir/model in target.json, beside metrics.json."""
    write_json(out_dir / "target.json", describe_target(out_dir / "model", mask_token_id, eos_token_ids))
    write_json(out_dir / "metrics.json", dict(metrics))
