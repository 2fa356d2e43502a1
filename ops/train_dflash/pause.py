"""A training that pauses: its state travels in its artifact to the node that continues it.

state/      the newest checkpoint and the best one that it names, as in a work folder (ops/lib/training/checkpoint.py)

The node that continues finds them in its own work folder, as if it had been killed after that step, so that it gives
the same bytes as a training without a pause. Files are linked, not copied: a checkpoint never changes.
"""

from __future__ import annotations

from pathlib import Path

from dsl.errors import DataError
from dsl.stage import Stage
from ops.lib.data.files import link_or_copy
from ops.lib.training.checkpoint import checkpoints, with_its_best

STATE = "state"


def keep_state(stage: Stage, step: int) -> None:
    """Put the checkpoint of a step, which is written, into the artifact."""
    for folder in with_its_best(stage.work_dir, step):
        _link_folder(folder, stage.out_dir / STATE / folder.name)


def take_over(stage: Stage) -> None:
    """Put the state of the training that this one continues into the work folder, unless there is a checkpoint already.

    The first rank calls it before any rank looks for checkpoints. Raises DataError where that training kept no state.
    """
    earlier = stage.inputs.get("continues")
    if stage.rank or earlier is None or checkpoints(stage.work_dir):
        return
    kept = checkpoints(earlier.path / STATE)
    if not kept:
        raise DataError(f"{earlier.path}: this training kept no state to go on from; give it pause_after")
    for folder in kept:  # the newest last: without it, the training goes on from an older one
        _link_folder(folder, stage.work_dir / folder.name)


def _link_folder(source: Path, target: Path) -> None:
    """Link all files of a checkpoint; its folder has its name only once it is whole."""
    unfinished = target.with_suffix(".tmp")
    unfinished.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        (unfinished / file.name).unlink(missing_ok=True)
        link_or_copy(file, unfinished / file.name)
    unfinished.rename(target)
