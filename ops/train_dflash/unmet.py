"""What keeps a training from its start: an own algorithm that fails its trial."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from dsl.draft_folders import own_algorithms
from dsl.imports import PROJECT
from ops.train_dflash.op import TrainDflash

TRIAL = "ops.lib.drafts.own_trial"  # not imported: it loads torch


def unmet(config: TrainDflash) -> dict[str, str]:
    """What goes wrong first where another process makes a draft of an own algorithm, and calls its functions."""
    folder = own_algorithms().get(config.algorithm)
    if folder is None:
        return {}
    fields = {} if config.terms is None else dict(config.terms.sizes())
    training = json.dumps({"fields": fields, "own": config.own, "loss": config.loss}, sort_keys=True)
    mistake = _mistake(folder, config.block_size, min(config.num_layers, 2), training)
    return {"algorithm": mistake} if mistake else {}


@cache
def _mistake(folder: Path, block_size: int, layers: int, training: str) -> str:
    path = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", TRIAL, str(folder), str(block_size), str(layers), training],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"},
        check=False,
    )
    if done.returncode:
        return f"{folder}: the process that tries it ended with exit code {done.returncode}: {done.stderr[-500:]}"
    mistake: str = json.loads(done.stdout.splitlines()[-1])
    return mistake
