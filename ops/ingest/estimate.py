"""Estimate of `ingest` after a trial on a few samples."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from dsl.errors import DataError
from dsl.estimate import Estimate, Growth, Outlook
from dsl.op import is_builtin
from ops.ingest.op import Ingest
from ops.ingest.read import given_splits
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


def estimate(config: Ingest, outlook: Outlook) -> Estimate:
    """By the trial's counts of the whole source; before it only which splits stay empty is known."""
    trial = outlook.trial
    if outlook.artifact is not None:
        foreseen = SamplesForeseen.read(outlook.artifact, outlook.identity)
    else:
        foreseen = SamplesForeseen(identity=outlook.identity, empty=_empty(config))
    if trial is None:
        return Estimate(foreseen=foreseen)
    full: dict[Kind, float] = {}
    small: dict[Kind, float] = {}
    for category, by_split in read_json(trial.artifact / "source.json").items():
        counts = {split: by_split[split] for split in SPLITS if split in by_split}
        full |= {(category, split): count for split, count in kept_of(config, counts).items()}
        small |= {(category, split): count for split, count in kept_of(trial.config, counts).items()}
    samples = kept_samples(trial.artifact, Counts(small, full))
    growth = Growth(output=samples.amount("samples").growth, notes=(READ_WHOLE,))
    return Estimate(growth=growth, foreseen=evolve(foreseen, samples=samples))


def _empty(config: Ingest) -> frozenset[str]:
    """The splits that no sample gets: none is drawn, and no row or name of a file says so; the rows are read for that
    only where a fraction is 0.
    """
    if config.split is not None:
        return frozenset(SPLITS) - {config.split}
    drawn = {"val": config.val_fraction, "test": config.test_fraction}
    undrawn = {split for split, fraction in drawn.items() if not fraction}
    if not undrawn or (isinstance(config.source, str) and is_builtin(config.source)):
        return frozenset()
    reading = config.reading()
    if not all(source.exists() for source in reading.sources):
        return frozenset()
    try:
        return frozenset(undrawn - given_splits(reading))
    except DataError:  # the stage's own
        return frozenset()
