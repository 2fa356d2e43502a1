"""Write the plan of the global steps of training (steps.py)."""

from __future__ import annotations

from typing import Any

from attrs import asdict

from dsl.stage import Stage
from ops.lib.data.files import write_json, write_jsonl
from ops.lib.data.token_shards import TokenReader
from ops.lib.forecasts import FeaturesForecast, TokensForecast, refuse_conflicts
from ops.lib.target.feature_shards import FeatureReader
from ops.shard_sequence.conflicts import conflicts
from ops.shard_sequence.op import SPLIT, ShardSequence
from ops.shard_sequence.steps import plan_steps


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
