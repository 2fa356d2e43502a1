"""The table of CPU threads: how many an op makes use of, by the size of the target that it computes with.

A small model's products are so short that a second thread costs more than it brings. Measured on two cores, the speed
with two threads over that with one (8 layers, 600 tokens of vocabulary; `benchmarks/busy.py` measures whole stages):

    parameters    training step, 480 to 960 tokens    pass over 1,024 tokens    passes over 1 to 128 tokens
    2.9 million                       0.92 to 0.99                      1.02                   0.67 to 1.00
    7.9 million                       1.21 to 1.47                      1.40                   0.71 to 0.93
    27 million                        1.50 to 1.54                      1.46                   0.90 to 1.31
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsl.errors import DataError
from dsl.op import is_builtin
from dsl.threads import Folders
from ops.finetune_vlm.tiny_config import tiny_config
from ops.foreseen import read_config
from ops.load_target.sizes import TargetSizes

ONE_THREAD = 1
# Parameters of the target up to which one thread does: an op that passes over whole samples, and one that decodes.
BATCHES = 5_000_000
DECODING = 10_000_000


def threads_of_batches(config: Any, folders: Folders) -> int | None:
    """For an op that trains with its target's states, or passes whole samples through it."""
    return _limit(_target(folders), BATCHES)


def threads_of_decoding(config: Any, folders: Folders) -> int | None:
    """For an op that decodes with its target, token by token or block by block."""
    return _limit(_target(folders), DECODING)


def threads_of_finetuning(config: Any, folders: Folders) -> int | None:
    """By the checkpoint that the training starts from. A model id counts as large: it may not be here yet."""
    if is_builtin(config.init):
        tokens = folders["tokens"]
        info = _read(tokens / "tokens.json") if isinstance(tokens, Path) else None
        return None if info is None else _limit(tiny_config(info, {}), BATCHES)
    directory = Path(config.init)
    return _limit(_read(directory / "config.json"), BATCHES) if directory.is_dir() else None


def _target(folders: Folders) -> Mapping[str, Any] | None:
    """The config.json of the target that the node reads, None where there is none."""
    target = folders["target"]
    return _read(target / "model" / "config.json") if isinstance(target, Path) else None


def _read(path: Path) -> Mapping[str, Any] | None:
    """None for a file that the stage will refuse."""
    try:
        return read_config(path)
    except DataError:
        return None


def _limit(config: Mapping[str, Any] | None, parameters: int) -> int | None:
    """One thread for a target of so many parameters or fewer; a config that does not tell its size is a large one's."""
    if config is None:
        return None
    try:
        return ONE_THREAD if TargetSizes.of(config).parameters <= parameters else None
    except DataError:
        return None
