"""A trained target as a Hugging Face checkpoint directory, whole again where it was sharded over ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ops.lib.data.files import read_json, write_json
from ops.lib.sequence_parallel.target import ParallelTarget
from ops.lib.target.checkpoint_files import CODE, copy_files
from ops.lib.target.model import Target, complete_config
from ops.lib.training.dtensors import gathered, reshard
from ops.lib.training.rank_group import is_first


def save_target(parallel: ParallelTarget, directory: Path, source: Path | None = None) -> None:
    """Write the target's weights and config, in the compute dtype, with the original checkpoint's tensor names.

    SGLang can serve the directory, unlike transformers' own output for some families. source: the checkpoint whose code
    is copied, if it is trusted. Every rank calls it, and the first one writes; afterwards all may read.
    """
    model = parallel.target.model
    reshard(model)
    kept = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]
    weights = {}
    for name, tensor in named:
        if name in kept:
            whole = gathered(tensor)
            if is_first():
                weights[name] = whole.to("cpu", parallel.dtype if whole.is_floating_point() else whole.dtype)
    if is_first():
        stored, convert = parallel.target.family.for_saving(weights)
        model.save_pretrained(directory, state_dict=stored, save_original_format=convert)
        _write_dtype(directory / "config.json", parallel.dtype)
        complete_config(directory)
        if source is not None:
            copy_files(source, directory, CODE)
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def whole_target(parallel: ParallelTarget, saved: Path) -> Iterator[Target]:
    """Open a context with the target to decode with, in evaluation mode; with several ranks, each loads it from
    `saved`.

    Sharded layers only work in lockstep, ranks that share sequences keep no cache, and masters differ from what is
    written in bfloat16. One process in float32 uses the equal target in memory.
    """
    target = parallel.target
    if _differs_from_saved(parallel):
        yield Target.from_directory(saved, target.info, str(parallel.device), parallel.dtype)
        return
    target.model.eval()
    try:
        yield target
    finally:
        target.model.train()


@contextmanager
def saved_for_now(parallel: ParallelTarget, folder: Path, source: Path | None = None) -> Iterator[Path]:
    """Open a context with a folder that holds the current target, removed afterwards; empty if whole_target needs none.

    All ranks leave it after the same batch; if one fails, the others do not wait.
    """
    if not _differs_from_saved(parallel):
        yield folder
        return
    try:
        save_target(parallel, folder, source)
        yield folder
        if dist.is_initialized():
            dist.barrier()
    finally:
        if is_first():
            shutil.rmtree(folder, ignore_errors=True)


def _differs_from_saved(parallel: ParallelTarget) -> bool:
    """Whether the written target differs from the one in memory, so that answers must be made by the written one."""
    return parallel.world_size > 1 or parallel.dtype != torch.float32


def _write_dtype(config: Path, dtype: torch.dtype) -> None:
    """Correct the dtype in config.json, where save_pretrained writes the dtype of training."""
    content = read_json(config)
    for part in (content, content.get("text_config"), content.get("vision_config")):
        if part and "dtype" in part:
            part["dtype"] = str(dtype).removeprefix("torch.")
    write_json(config, content)
