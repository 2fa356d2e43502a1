"""How `regenerate_answers` is tried on a few samples."""

from __future__ import annotations

import math
from typing import Any

from dsl.smoke import Amount, Trial, Work
from ops.lib.scaling import TRAINED, SamplesGrown, kept_samples
from ops.regenerate_answers.op import RegenerateAnswers

HARDLY_TRAINED = (
    "a target that was trained for a few steps only gives answers as long as they may be: time, tokens and features "
    "from here on are at most what is told"
)


def regenerate_answers_smoke(config: RegenerateAnswers, samples: int) -> dict[str, Any]:
    """Tokens are drawn, and every answer is kept: the likeliest token of a target that was trained for a few steps may
    be one without a text, again and again, and its answers come to no end.
    """
    return {
        "temperature": max(config.temperature, 1.0),
        "top_p": min(config.top_p, 0.5),
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
        notes=(HARDLY_TRAINED,) if trial.foreseen["target"] == TRAINED else (),
        foreseen=SamplesGrown(samples=samples),
    )
