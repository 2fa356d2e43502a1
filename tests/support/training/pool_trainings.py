"""The trainings that are compared with and without a pool, and their inputs as a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsl.op import Artifact, Ref
from ops.artifacts import BatchPlan, TargetModel, TokenShards
from ops.train_dflash.op import TrainDflash

TYPES: Mapping[str, type[Artifact]] = {"tokens": TokenShards, "target": TargetModel, "batches": BatchPlan}
VALUES = {
    "capture": "online",
    "block_size": 8,
    "num_layers": 1,
    "num_anchors": 8,
    "max_steps": 8,
    "lr": 3e-3,
    "log_every": 1,
    "eval_every": 3,
    "eval_prompts": 1,
    "eval_new_tokens": 6,
    "micro_batch_tokens": 256,
    "seed": 0,
}


def config_of(inputs: Mapping[str, Any], **changes: Any) -> TrainDflash:
    return TrainDflash(**{name: Ref(name) for name in inputs}, **VALUES | changes)


def write_inputs(folder: Path, inputs: Mapping[str, Any]) -> None:
    listed = {name: [str(artifact.path), artifact.digest] for name, artifact in inputs.items()}
    (folder / "inputs.json").write_text(json.dumps(listed))


def read_inputs(folder: Path) -> dict[str, Any]:
    listed = json.loads((folder / "inputs.json").read_text())
    return {name: TYPES[name](path=Path(path), digest=digest) for name, (path, digest) in listed.items()}
