"""The table of CPU threads: how many an op can use, by the size of its target.

A small model's matrix products are so short that a second thread gains little, a third almost nothing, and all threads
wait for each other whenever another process uses a core. Speed with two threads over that with one, in whole stages of
the built-in target (3.1 million parameters) on two idle cores, spinning for 1,000 iterations and for 300,000:

    finetune_vlm 1.2, 1.5    capture_targets 1.3, 1.4    train_dflash 0.75, 0.9    evaluate 0.65, 1.05
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dsl.errors import DataError
from dsl.op import is_builtin
from dsl.op_class import Folders
from ops.lib.forecasts import read_config
from ops.lib.target.checkpoint_check import sizes_in
from ops.lib.target.sizes import TargetSizes
from ops.lib.target.tiny_config import tiny_config

# Parameters up to which a target is small: for an op that passes over whole samples, and for one that decodes.
BATCHES = 5_000_000
DECODING = 10_000_000


def threads_of_batches(config: Any, folders: Folders) -> int | None:
    """The useful threads for an op that passes whole samples through its target; None (no limit) unless it is small."""
    return _limit(_target(folders), BATCHES, threads=2)


def threads_of_drafting(config: Any, folders: Folders) -> int | None:
    """The useful threads for an op that trains a draft with its target's states; None unless the target is small."""
    return _limit(_target(folders), BATCHES, threads=1)


def threads_of_decoding(config: Any, folders: Folders) -> int | None:
    """The useful threads for an op that decodes with its target; None unless the target is small."""
    return _limit(_target(folders), DECODING, threads=1)


def threads_of_finetuning(config: Any, folders: Folders) -> int | None:
    """The useful threads for a fine-tuning, by its starting checkpoint; None unless that is small.

    A model id counts as large: it may not be downloaded yet.
    """
    if is_builtin(config.init):
        tokens = folders["tokens"]
        info = _read(tokens / "tokens.json") if isinstance(tokens, Path) else None
        start: Mapping[str, Any] | None = None if info is None else tiny_config(info, {})
    else:
        directory = Path(config.init)
        start = _read(directory / "config.json") if directory.is_dir() else None
    return _limit(None if start is None else partial(TargetSizes.of, start), BATCHES, threads=2)


def _target(folders: Folders) -> Callable[[], TargetSizes] | None:
    """What finds the sizes of the node's target; None without one."""
    target = folders["target"]
    if not isinstance(target, Path):
        return None
    config = _read(target / "model" / "config.json")
    return None if config is None else partial(sizes_in, target / "model", config)


def _read(path: Path) -> Mapping[str, Any] | None:
    """Read a config.json; None for a file that the stage will reject."""
    try:
        return read_config(path)
    except DataError:
        return None


def _limit(sizes: Callable[[], TargetSizes] | None, parameters: int, threads: int) -> int | None:
    """The threads if the target has at most these parameters; a config without sizes counts as large."""
    if sizes is None:
        return None
    try:
        return threads if sizes().parameters <= parameters else None
    except DataError:
        return None
