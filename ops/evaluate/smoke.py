"""How `evaluate` is tried on a few samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsl.smoke import Amount, Trial, Work
from ops.evaluate.op import Evaluate
from ops.ingest.records import json_records
from ops.lib.scaling import Kind

PROMPTS = 4
UNTRAINED = "a draft that was trained in full needs fewer steps for an answer, and a target may end it sooner"


def evaluate_smoke(config: Evaluate, samples: int) -> dict[str, Any]:
    """A few prompts of each category."""
    return {"max_prompts": min(config.max_prompts or PROMPTS, PROMPTS)}


def evaluate_work(trial: Trial) -> Work | None:
    given = trial.foreseen["tokens"]
    if trial.config.benchmark is not None:
        sizes = Counter(_categories(Path(trial.config.benchmark)))
        small, full = (_prompts(sizes, config.max_prompts) for config in (trial.small, trial.config))
    elif given is not None:
        small = _prompts(_of_split(given.samples.trial, trial.config.split), trial.small.max_prompts)
        full = _prompts(_of_split(given.samples.full, trial.config.split), trial.config.max_prompts)
    else:
        return None
    return Work(series=(Amount(small, full, "prompts"),), output=max(1.0, full / max(small, 1)), notes=(UNTRAINED,))


def _of_split(samples: Mapping[Kind, float], split: str) -> dict[str, float]:
    return {category: count for (category, of), count in samples.items() if of == split}


def _categories(file: Path) -> Iterator[str]:
    """Of each line of a benchmark that the trial has read without a mistake."""
    return (str(record.row["category"]) for record in json_records(file))


def _prompts(by_category: Mapping[str, float], limit: int | None) -> float:
    return sum(min(count, limit or count) for count in by_category.values())
