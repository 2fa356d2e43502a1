"""How `regenerate_answers` is tried on a few samples."""

from __future__ import annotations

import math
from typing import Any

from dsl.smoke import Amount, Trial, Work
from ops.growth import SamplesGrown, kept_samples
from ops.regenerate_answers.op import RegenerateAnswers

HARDLY_TRAINED = "answers of a target that was trained for a few steps only are as long as they may be"


def regenerate_answers_smoke(config: RegenerateAnswers, samples: int) -> dict[str, Any]:
    """Every answer is kept: a target that was trained for a few steps comes to no end, and repeats itself."""
    return {
        "finish_reasons": ("stop", "length"),
        "min_answer_tokens": 1,
        "max_answer_tokens": None,
        "drop_retokenised": False,
        "max_dropped": None,
    }


def regenerate_answers_work(trial: Trial) -> Work | None:
    """Samples that are asked together take hardly longer than one alone, so the batches tell the least time."""
    config, given = trial.config, trial.foreseen["samples"]
    if given is None:
        return None
    small, full = given.samples.of(config.splits)
    together = config.concurrency if config.backend == "endpoint" else config.batch_tokens / config.max_new_tokens
    batches = math.ceil(small / max(together, 1))
    fewest = small * math.ceil(full / max(together, 1)) / max(batches, 1)
    samples = kept_samples(trial.artifact, given.samples)
    return Work(
        series=(Amount(small, full, "samples", fewest=min(fewest, full)),),
        output=samples.amount("samples").growth,
        notes=(HARDLY_TRAINED,),
        foreseen=SamplesGrown(samples=samples),
    )
