"""Estimate of `shard_sequence` after a trial on a few samples."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from attrs import frozen

from dsl.estimate import Amount, Estimate, Growth, PlanContext
from ops.lib.data.batching import padded_length
from ops.lib.data.files import read_json
from ops.lib.forecasts import StepsForecast, TokensForecast, first_counted, identity_of
from ops.shard_sequence.op import SPLIT, ShardSequence
from ops.shard_sequence.steps import steps_of_tokens

EPOCHS = 4


@frozen(kw_only=True)
class PlannedSteps(StepsForecast):
    """A forecast of a plan of batches with its passes over the train split, and the most tokens of a step."""

    epochs: int
    step_limit: int


def smoke(config: ShardSequence, samples: int) -> dict[str, Any]:
    """Fields for a smoke run: several epochs, as the few samples make only one step each."""
    return {"epochs": max(config.epochs, EPOCHS)}


def estimate(config: ShardSequence, context: PlanContext) -> Estimate:
    features, tokens_read = context.inputs["features"], context.inputs["tokens"]
    of_tokens = identity_of(tokens_read) if features is None else features.of_tokens
    counted = first_counted(features, tokens_read)
    known: dict[str, Any] = {
        "of_tokens": of_tokens,
        "pad_multiple": config.pad_multiple,
        "epochs": config.epochs,
        "step_limit": config.tokens_per_step,
    }
    if context.trial is None or counted is None:
        read = tokens_read if features is None else features.tokens
        if context.artifact is not None:
            forecast = PlannedSteps.read(context.artifact, **known)
        elif read is not None and read.folder is not None:
            forecast = PlannedSteps(**known, count=partial(steps_of_tokens, read.folder, config))
        else:
            forecast = PlannedSteps(**known)
        return Estimate(forecast=forecast, notes=_too_long(config, read))
    tokens, samples = counted.tokens.of(("train",))[1], counted.samples.of(("train",))[1]
    of_epoch = steps_of_epoch(tokens, samples, config.tokens_per_step)
    steps = Amount(read_json(context.trial.artifact / "plan.json")["steps"], of_epoch * config.epochs)
    forecast = PlannedSteps(steps=steps, tokens_per_step=tokens / of_epoch, **known)
    return Estimate(growth=Growth(output=max(1.0, steps.growth)), forecast=forecast)


def steps_of_epoch(tokens: float, samples: float, tokens_per_step: int) -> int:
    """Estimate the steps of one epoch: each ends before the sample that does not fit, half of one on average."""
    left_free = tokens / max(samples, 1) / 2
    return max(1, math.ceil(tokens / max(tokens_per_step - left_free, tokens_per_step / 2)))


def _too_long(config: ShardSequence, tokens: TokensForecast | None) -> tuple[str, ...]:
    """A note if a sample may be longer than a step; only the stage knows its split's lengths."""
    if tokens is None or padded_length(tokens.longest, config.pad_multiple) <= config.tokens_per_step:
        return ()
    return (
        f"a sample of the split {SPLIT} may have at most tokens_per_step = {config.tokens_per_step:,} tokens, and "
        f"max_length of tokenize_chat lets {tokens.longest:,} pass: should there be a longer one, this node says so",
    )
