"""Needs of `regenerate_answers` if the target runs here: its weights."""

from __future__ import annotations

import math
from typing import Any

from attrs import evolve

from dsl.estimate import Amount, Estimate, Growth, Outlook
from ops.lib.estimates import (
    Answered,
    Counts,
    SamplesForeseen,
    TargetForeseen,
    identity_of,
    kept_samples,
    processor_templates,
    template_digest,
)
from ops.lib.target.sizes import ITEM_SIZES
from ops.lib.threads import threads_of_decoding
from ops.regenerate_answers.op import RegenerateAnswers

HARDLY_TRAINED = (
    "a target trained for only a few steps gives answers of the maximum length: time, tokens and features "
    "from here on are upper bounds"
)

KEPT = 'answers = "data": the answers of the data set stay, and nothing is generated'

threads = threads_of_decoding


def smoke(config: RegenerateAnswers, samples: int) -> dict[str, Any]:
    """Samples tokens, and keeps every answer: a target trained for a few steps may repeat one token without text, and
    its answers do not end.
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


def estimate(config: RegenerateAnswers, outlook: Outlook) -> Estimate:
    """No memory if a server answers, or the data."""
    target: TargetForeseen | None = outlook.inputs["target"]
    source: SamplesForeseen | None = outlook.inputs["samples"]
    growth = None
    generates = config.answers == "target"
    foreseen = _foreseen(config, outlook, source)
    if outlook.trial is not None and source is not None and source.samples is not None:
        kept = kept_samples(outlook.trial.artifact, source.samples)
        foreseen = evolve(foreseen, samples=kept)
        growth = Growth(
            series=(_answered(config, source.samples),) if generates else (),
            output=kept.amount("samples").growth,
            notes=(HARDLY_TRAINED,) if generates and target is not None and target.is_tried else (),
        )
    if not generates:
        return Estimate(growth=growth, foreseen=foreseen, notes=(KEPT,))
    if target is None or config.backend != "huggingface":
        return Estimate(growth=growth, foreseen=foreseen)
    return Estimate(
        memory={"target": target.sizes.parameters * ITEM_SIZES[config.dtype]},
        growth=growth,
        foreseen=foreseen,
    )


def _foreseen(config: RegenerateAnswers, outlook: Outlook, source: SamplesForeseen | None) -> SamplesForeseen:
    answered = Answered(
        enable_thinking=config.enable_thinking,
        has_target=config.target is not None,
        target=identity_of(outlook.inputs["target"]),
        chat_template=template_digest(config.chat_template),
        templates=processor_templates(config.processor),
    )
    if outlook.artifact is not None:
        made = SamplesForeseen.read(outlook.artifact, outlook.identity)
        if made.answered is not None:  # it holds how they were generated, and the node where
            made = evolve(made, answered=evolve(answered, enable_thinking=made.answered.enable_thinking))
        return made
    return SamplesForeseen(
        identity=outlook.identity,
        empty=source.empty if source is not None else frozenset(),
        answered=answered if config.answers == "target" else None,
    )


def _answered(config: RegenerateAnswers, samples: Counts) -> Amount:
    """Samples answered together take little longer than one, so the number of batches gives the least time."""
    small, full = samples.of(config.splits)
    together = config.concurrency if config.backend == "endpoint" else config.batch_tokens / config.max_new_tokens
    batches = math.ceil(small / max(together, 1))
    fewest = small * math.ceil(full / max(together, 1)) / max(batches, 1)
    return Amount(small, full, "samples", fewest=min(fewest, full))
