"""How `finetune_vlm` is tried on a few samples."""

from __future__ import annotations

from typing import Any

from dsl.smoke import Amount, Trial, Work
from ops.finetune_vlm.op import FinetuneVlm
from ops.lib.scaling import TRAINED, TokensGrown

STEPS = 8


def finetune_vlm_smoke(config: FinetuneVlm, samples: int) -> dict[str, Any]:
    """A few steps of full size with a checkpoint between them; measured at the end alone."""
    return {
        "steps": min(config.steps, STEPS),
        "checkpoint_every": min(config.checkpoint_every, STEPS // 2),
        "eval_every": None,
    }


def finetune_vlm_work(trial: Trial) -> Work:
    """The steps, and the answers to val and test that are compared; those to val after every eval_every steps too."""
    config, tokens = trial.config, trial.foreseen["tokens"]
    series = [Amount(trial.small.steps, config.steps, "steps")]
    if config.metric != "none" and tokens is not None:
        measured = 1 if config.eval_every is None else 1 + (config.steps - 1) // config.eval_every
        series += [_answers(config, tokens, "val", measured), _answers(config, tokens, "test", 1)]
    return Work(series=tuple(amount for amount in series if amount.trial), foreseen=TRAINED)


def _answers(config: FinetuneVlm, tokens: TokensGrown, split: str, times: int) -> Amount:
    trial, full = tokens.samples.of((split,))
    if config.eval_samples is not None:
        trial, full = min(trial, config.eval_samples), min(full, config.eval_samples)
    return Amount(trial, full * times, "answers")
