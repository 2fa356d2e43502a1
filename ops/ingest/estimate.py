"""Estimate of `ingest` after a trial on a few samples."""

from __future__ import annotations

from typing import Any

from dsl.estimate import Estimate, Growth, Outlook
from ops.ingest.op import Ingest
from ops.ingest.splits import kept_of
from ops.lib.data.files import read_json
from ops.lib.data.sample_account import SPLITS
from ops.lib.estimates import Counts, Kind, SamplesForeseen, kept_samples

READ_WHOLE = "the smoke run reads the whole source too; the full run also writes the images"


def smoke(config: Ingest, samples: int) -> dict[str, Any]:
    """`samples` samples with images, and as many without; of each split a quarter at least, so that nodes that drop
    samples do not empty it.
    """
    limit = samples if config.max_samples is None else min(samples, config.max_samples)
    return {"max_samples": limit, "min_per_split": max(config.min_per_split, limit // 4)}


def estimate(config: Ingest, outlook: Outlook) -> Estimate | None:
    """By the trial's counts of the whole source; None before it."""
    trial = outlook.trial
    if trial is None:
        return None
    full: dict[Kind, float] = {}
    small: dict[Kind, float] = {}
    for category, by_split in read_json(trial.artifact / "source.json").items():
        counts = {split: by_split[split] for split in SPLITS if split in by_split}
        full |= {(category, split): count for split, count in kept_of(config, counts).items()}
        small |= {(category, split): count for split, count in kept_of(trial.config, counts).items()}
    samples = kept_samples(trial.artifact, Counts(small, full))
    growth = Growth(output=samples.amount("samples").growth, notes=(READ_WHOLE,))
    return Estimate(growth=growth, foreseen=SamplesForeseen(samples=samples))
