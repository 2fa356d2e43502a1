"""Take a checkpoint as the target: copy its weights, config and processor, and describe it."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from dsl.errors import DataError
from dsl.stage import Stage
from ops.load_target.model import describe_target, read_config
from ops.load_target.op import LoadTarget
from ops.load_target.save import CONFIGS, PROCESSOR, WEIGHTS, copy_files, write_target_json
from ops.vision.processor import load_processor


def load_target(config: LoadTarget, stage: Stage) -> None:
    """Write the TargetModel artifact of a local directory or of a model id."""
    directory = find_checkpoint(config.checkpoint, config.revision)
    processor = load_processor(str(directory))
    mask_token_id = processor.mask_token_id if config.mask_token_id is None else config.mask_token_id
    info = describe_target(directory, mask_token_id, processor.eos_token_ids)  # before gigabytes are copied
    copy_files(directory, stage.out_dir / "model", (*CONFIGS, *WEIGHTS, *PROCESSOR))
    write_target_json(stage.out_dir, info, {})


def find_checkpoint(name: str, revision: str | None) -> Path:
    """The directory of a checkpoint; a model id is downloaded into Hugging Face's cache first. Raises DataError."""
    directory = Path(name)
    if directory.is_file():
        raise DataError(f"{name} is a file; a checkpoint is the directory that holds config.json and *.safetensors")
    if not directory.is_dir():
        patterns = [*CONFIGS, *WEIGHTS, *PROCESSOR]
        try:
            directory = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
            raise DataError(f'"{name}" is neither a directory here nor a model that can be fetched: {error}') from error
    read_config(directory)
    return directory
