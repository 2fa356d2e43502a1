"""How `train_dflash` is tried on a few samples."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from dsl.smoke import Amount, Trial, Work
from ops.lib.data.files import read_jsonl
from ops.lib.scaling import Kind, StepsGrown, TokensGrown
from ops.train_dflash.op import TrainDflash

STEPS = 8


def train_dflash_smoke(config: TrainDflash, samples: int) -> dict[str, Any]:
    """A few steps with a checkpoint between them; measured at the end alone, where the full run measures too."""
    return {
        "max_steps": min(config.max_steps or STEPS, STEPS),
        "checkpoint_every": min(config.checkpoint_every, STEPS // 2),
        "eval_every": None if config.eval_every is None else STEPS,
    }


def train_dflash_work(trial: Trial) -> Work | None:
    """A step of a few samples is not a full one, so steps are weighed by their tokens."""
    config, plan = trial.config, trial.foreseen["batches"]
    if not isinstance(plan, StepsGrown):
        return None
    steps = min(plan.steps.full, config.max_steps or plan.steps.full)
    rows = islice(read_jsonl(trial.inputs["batches"] / "steps.jsonl"), trial.small.max_steps)
    small = sum(row["tokens"] for row in rows)
    return Work(
        series=(Amount(small, steps * plan.tokens_per_step, "tokens"),),
        tail=max(1.0, _measuring(trial, steps)),
        notes=(f"about {steps:,.0f} steps",),
    )


def _measuring(trial: Trial, steps: float) -> float:
    """How many times longer the val split takes to be measured, over all the times that it is.

    That of its loss, which grows with the split, or of tau, which stops at `eval_prompts`: the larger of the two.
    """
    config, tokens = trial.config, trial.foreseen["tokens"]
    given = trial.foreseen["features"] or tokens
    if not isinstance(given, TokensGrown):
        return 1.0
    times = 1 if config.eval_every is None else 1 + (steps - 1) // config.eval_every
    growth = given.tokens.amount("tokens", ("val",)).growth
    if config.measures_tau and isinstance(tokens, TokensGrown):
        small = _prompts(tokens.samples.trial, config.eval_prompts)
        growth = max(growth, _prompts(tokens.samples.full, config.eval_prompts) / max(small, 1))
    return times * growth


def _prompts(samples: Mapping[Kind, float], limit: int) -> float:
    return sum(min(count, limit) for (_, split), count in samples.items() if split == "val")
