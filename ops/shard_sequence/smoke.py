"""How `shard_sequence` is tried on a few samples."""

from __future__ import annotations

import math
from typing import Any

from dsl.smoke import Amount, Trial, Work
from ops.lib.data.files import read_json
from ops.lib.scaling import StepsGrown
from ops.shard_sequence.op import ShardSequence

EPOCHS = 4


def shard_sequence_smoke(config: ShardSequence, samples: int) -> dict[str, Any]:
    """A few samples make one step of an epoch: several of them, so that training can be measured."""
    return {"epochs": max(config.epochs, EPOCHS)}


def shard_sequence_work(trial: Trial) -> Work | None:
    config = trial.config
    given = trial.foreseen["features"] or trial.foreseen["tokens"]
    if given is None:
        return None
    tokens, samples = given.tokens.of(("train",))[1], given.samples.of(("train",))[1]
    left_free = tokens / max(samples, 1) / 2  # a step ends where the next sample does not fit: half of one, on average
    of_epoch = max(1, math.ceil(tokens / max(config.tokens_per_step - left_free, config.tokens_per_step / 2)))
    steps = Amount(read_json(trial.artifact / "plan.json")["steps"], of_epoch * config.epochs, "steps")
    grown = StepsGrown(steps=steps, tokens_per_step=tokens / of_epoch)
    return Work(output=max(1.0, steps.growth), foreseen=grown)
