"""How `evaluate` is tried on a few samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsl.smoke import Amount, Trial, Work
from ops.evaluate.op import Evaluate
from ops.growth import Kind

PROMPTS = 4
UNTRAINED = "a draft that was trained in full needs fewer steps for an answer, and a target may end it sooner"


def evaluate_smoke(config: Evaluate, samples: int) -> dict[str, Any]:
    """A few prompts of each category."""
    return {"max_prompts": min(config.max_prompts or PROMPTS, PROMPTS)}


def evaluate_work(trial: Trial) -> Work | None:
    given, split = trial.foreseen["tokens"], trial.config.split
    if given is None:
        return None
    small = _prompts(given.samples.trial, split, trial.small.max_prompts)
    full = _prompts(given.samples.full, split, trial.config.max_prompts)
    return Work(series=(Amount(small, full, "prompts"),), output=max(1.0, full / max(small, 1)), notes=(UNTRAINED,))


def _prompts(samples: Mapping[Kind, float], split: str, limit: int | None) -> float:
    return sum(min(count, limit or count) for (_, of), count in samples.items() if of == split)
