"""What keeps a training from its start: a warm start of another shape, an own algorithm whose modules do not work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dsl.draft_folders import own_algorithms
from dsl.errors import ConfigError
from dsl.imports import PROJECT
from ops.lib.drafts.algorithms import plain
from ops.lib.estimates import DraftForeseen, TargetForeseen
from ops.train_dflash.estimate import expected_shape
from ops.train_dflash.op import TrainDflash

CHECK = "ops.lib.drafts.own_modules"  # not imported: it loads torch
# What decides the shape of a draft -> the field of train_dflash, None for what the target decides.
COMPARED = {
    "hidden_size": None,
    "vocab_size": None,
    "num_target_layers": None,
    "block_size": "block_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "layer_types": "sliding_layers",
    "sliding_window": "sliding_window",
}


def unfit(config: TrainDflash, foreseen: Mapping[str, Any]) -> dict[str, str]:
    """Every size in which the draft of a warm start differs from the draft to be trained."""
    parent: DraftForeseen | None = foreseen.get("warm_start")
    target: TargetForeseen | None = foreseen["target"]
    if parent is None or target is None:
        return {}
    features = foreseen.get("features")
    try:
        shape = expected_shape(config, target, features)
    except ConfigError:
        return {}  # of the training itself, whatever it starts from
    fields = COMPARED if config.rope_theta is None else COMPARED | {"rope_theta": "rope_theta"}
    wrong = []
    for name, field in fields.items():
        there, here = getattr(parent.shape, name), getattr(shape, name)
        if there != here:
            remedy = "give the target that it was made for" if field is None else f"set {field}, or start from another"
            wrong.append(f"{name}: {_shown(there)} in the draft, {_shown(here)} in this training: {remedy}")
    there_ids, here_ids = parent.shape.target_layer_ids, shape.target_layer_ids
    if there_ids != here_ids and (len(there_ids) != len(here_ids) or parent.knows_layers):
        wrong.append(
            f"target_layer_ids: {_shown(there_ids)} in the draft, {_shown(here_ids)} in this training: capture those "
            "of the draft (target_layer_ids)"
        )
    there_algorithm, here_algorithm = parent.shape.algorithm, shape.algorithm
    if there_algorithm not in (plain(), here_algorithm):
        wrong.append(
            f"algorithm: {there_algorithm.name} in the draft, {here_algorithm.name} in this training, or other sizes "
            "of it: a training starts from a draft of its own algorithm or from plain DFlash"
        )
    return {"warm_start": "\n".join(wrong)} if wrong else {}


def _shown(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def unmet(config: TrainDflash) -> dict[str, str]:
    """Why no draft can be made of the algorithm's modules, or trained by its functions; another process tries it."""
    folder = own_algorithms().get(config.algorithm)
    if folder is None:
        return {}
    fields = {} if config.terms is None else dict(config.terms.sizes())
    training = json.dumps({"fields": fields, "own": config.own, "loss": config.loss}, sort_keys=True)
    mistakes = _mistakes(folder, config.block_size, min(config.num_layers, 2), training)
    return {"algorithm": "\n".join(mistakes)} if mistakes else {}


@cache
def _mistakes(folder: Path, block_size: int, layers: int, training: str) -> list[str]:
    path = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", CHECK, str(folder), str(block_size), str(layers), training],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"},
        check=False,
    )
    if done.returncode:
        return [f"{folder}: the process that tries it ended with exit code {done.returncode}: {done.stderr[-500:]}"]
    mistakes: list[str] = json.loads(done.stdout.splitlines()[-1])
    return mistakes
