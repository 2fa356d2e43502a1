"""Take a checkpoint as the target: copy its weights, config and processor, and describe it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from dsl.errors import DataError
from dsl.stage import Stage
from ops.files import read_json
from ops.load_target.model import read_config
from ops.load_target.op import LoadTarget
from ops.load_target.save import CONFIGS, PROCESSOR, WEIGHTS, copy_files, write_target_json


def load_target(config: LoadTarget, stage: Stage) -> None:
    """Write the TargetModel artifact of a local directory or of a model id."""
    directory = find_checkpoint(config.checkpoint, config.revision)
    mask_token_id = config.mask_token_id
    if mask_token_id is None:
        mask_token_id = find_mask_token(directory)
    eos_token_ids = find_eos_tokens(directory)
    copy_files(directory, stage.out_dir / "model", (*CONFIGS, *WEIGHTS, *PROCESSOR))
    write_target_json(stage.out_dir, mask_token_id, eos_token_ids, {})


def find_checkpoint(name: str, revision: str | None) -> Path:
    """The directory of a checkpoint; a model id is downloaded into Hugging Face's cache first. Raises DataError."""
    directory = Path(name)
    if not directory.is_dir():
        patterns = [*CONFIGS, *WEIGHTS, *PROCESSOR]
        try:
            directory = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
            raise DataError(f'"{name}" is neither a directory here nor a model that can be fetched: {error}') from error
    read_config(directory)
    return directory


def find_eos_tokens(directory: Path) -> list[int]:
    """The ids at which generation ends: generation_config.json, else config.json, else its text_config."""
    config = read_config(directory)
    sources: list[Mapping[str, Any]] = [config, config.get("text_config", {})]
    if (directory / "generation_config.json").exists():
        sources.insert(0, read_json(directory / "generation_config.json"))
    for source in sources:
        ids = source.get("eos_token_id")
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    raise DataError(f"{directory}: no eos_token_id in generation_config.json or config.json")
