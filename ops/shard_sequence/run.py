"""Plan the global steps of training: shuffle every epoch by hash, then fill steps up to their number of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import asdict, frozen

from dsl.errors import DataError
from dsl.stage import Stage
from ops.lib.data.batching import padded_length
from ops.lib.data.files import write_json, write_jsonl
from ops.lib.data.token_shards import TokenReader
from ops.lib.forecasts import FeaturesForecast, TokensForecast, refuse_conflicts
from ops.lib.target.feature_shards import FeatureReader
from ops.shard_sequence.conflicts import conflicts
from ops.shard_sequence.op import SPLIT, ShardSequence


@frozen
class Step:
    """One global training step. samples: indices into the split's samples. tokens: including padding."""

    step: int
    epoch: int
    samples: tuple[int, ...]
    tokens: int


def shard_sequence(config: ShardSequence, stage: Stage) -> None:
    """Write plan.json and steps.jsonl of a BatchPlan.

    Raises DataError for a split without samples, and for a sample longer than a step.
    """
    refuse_conflicts(conflicts(config, _statements(stage)))
    stage.info(f"reading the lengths of all samples, and planning the steps of {config.epochs} epochs")
    lengths = _lengths(stage)
    seed = config.seed or 0
    steps = list(plan_steps(lengths, config.tokens_per_step, config.pad_multiple, config.epochs, seed))
    plan = {
        "format": 1,
        "steps": len(steps),
        "epochs": config.epochs,
        "samples": len(lengths),
        "tokens_per_step": config.tokens_per_step,
        "pad_multiple": config.pad_multiple,
        "seed": seed,
        "split": SPLIT,
    }
    write_json(stage.out_dir / "plan.json", plan)
    write_jsonl(stage.out_dir / "steps.jsonl", (asdict(step) for step in steps))
    stage.log({"shard/steps": len(steps), "shard/samples": len(lengths)}, step=0)
    stage.progress(len(steps), len(steps))


def _statements(stage: Stage) -> dict[str, Any]:
    """The forecasts that describe the stage's real inputs, by edge."""
    features, tokens = stage.inputs.get("features"), stage.inputs.get("tokens")
    return {
        "features": None if features is None else FeaturesForecast.read(features.path, features.digest),
        "tokens": None if tokens is None else TokensForecast.read(tokens.path, tokens.digest),
    }


def _lengths(stage: Stage) -> list[int]:
    """The number of tokens of each sample in the split, from features or tokens, where it is equal."""
    features = stage.inputs.get("features")
    if features is not None:
        return FeatureReader(features, SPLIT).lengths
    return [record["tokens"] for record in TokenReader(stage.inputs["tokens"], SPLIT).records]


def plan_steps(
    lengths: Sequence[int], tokens_per_step: int, pad_multiple: int, epochs: int, seed: int
) -> Iterator[Step]:
    """The steps in order. Every sample is used once per epoch; no step has samples of two epochs."""
    padded = [padded_length(length, pad_multiple) for length in lengths]
    longest = max(range(len(padded)), key=padded.__getitem__)
    if padded[longest] > tokens_per_step:
        raise DataError(
            f"sample {longest} of the split {SPLIT} has {lengths[longest]} tokens, {padded[longest]} when padded: more "
            f"than tokens_per_step = {tokens_per_step}; raise it, or lower max_length of tokenize_chat"
        )
    step = 0
    for epoch in range(epochs):
        samples: list[int] = []
        tokens = 0
        for sample in epoch_order(len(lengths), seed, epoch):
            if tokens + padded[sample] > tokens_per_step:
                yield Step(step, epoch, tuple(samples), tokens)
                step, samples, tokens = step + 1, [], 0
            samples.append(sample)
            tokens += padded[sample]
        yield Step(step, epoch, tuple(samples), tokens)
        step += 1


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(count) that depends only on (seed, epoch): sorted by the sha256 of each index."""
    return sorted(range(count), key=lambda sample: hashlib.sha256(f"{seed}/{epoch}/{sample}".encode()).digest())
