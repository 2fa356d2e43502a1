"""What an ingest needs, and sources that cannot be read."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from attrs import evolve

from dsl.errors import DataError
from dsl.estimate import Estimate, Growth, PlanContext
from dsl.op import is_builtin
from ops.ingest.op import Ingest
from ops.ingest.read import given_splits
from ops.ingest.rows import row_mistake
from ops.ingest.source import Part, check_builtin, mistakes_of_parts
from ops.ingest.splits import kept_of
from ops.ingest.tools import default_tools
from ops.ingest.traffic import OUTPUT
from ops.lib.data.files import read_json
from ops.lib.data.sample_account import SPLITS
from ops.lib.forecasts import FIRST_ROWS, Counts, Kind, SamplesForecast, kept_samples

READ_WHOLE = "the smoke run reads the whole source too"
WRITES = "; the full run also writes the images"


def smoke(config: Ingest, samples: int) -> dict[str, Any]:
    """Fields for a smoke run: `samples` samples with images, and as many without.

    At least a quarter of each split is kept, so that nodes that drop samples do not empty it.
    """
    limit = samples if config.max_samples is None else min(samples, config.max_samples)
    return {"max_samples": limit, "min_per_split": max(config.min_per_split, limit // 4)}


def estimate(config: Ingest, context: PlanContext) -> Estimate:
    """Estimate the samples by the trial's counts of the whole source; before a trial only empty splits are known."""
    trial = context.trial
    if context.artifact is not None:
        forecast = SamplesForecast.read(context.artifact, context.identity)
    else:
        forecast = SamplesForecast(identity=context.identity, empty=_empty(config), has_tools=_has_tools(config))
    if trial is None:
        return Estimate(forecast=forecast)
    full: dict[Kind, float] = {}
    small: dict[Kind, float] = {}
    for category, by_split in read_json(trial.artifact / "source.json").items():
        counts = {split: by_split[split] for split in SPLITS if split in by_split}
        full |= {(category, split): count for split, count in kept_of(config, counts).items()}
        small |= {(category, split): count for split, count in kept_of(trial.config, counts).items()}
    samples = kept_samples(trial.artifact, Counts(small, full))
    growth = Growth(
        output=samples.amount().growth,
        notes=(f"{READ_WHOLE}{WRITES if any(kind == 'image' for kind, _ in full) else ''}",),
    )
    return Estimate(growth=growth, forecast=evolve(forecast, samples=samples))


def _empty(config: Ingest) -> frozenset[str]:
    """The splits that no sample gets: their fraction is 0, and no row or file name selects them.

    Rows are read only if a fraction is 0.
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


def _has_tools(config: Ingest) -> bool:
    """Whether there are default_tools, or a source's first rows have tools; False for one that cannot be read."""
    if config.default_tools is not None:
        return True
    if isinstance(config.source, str) and is_builtin(config.source):
        return False
    reading = config.reading()
    for source in reading.sources:
        with suppress(DataError):
            form = reading.form(source)
            parts = [] if form in ("image-folder", "arrow") else reading.parts(source, form, with_bytes=False)
            rows = (record.row for part in parts[:1] for record in islice(part.records(), FIRST_ROWS))
            if any(isinstance(row, dict) and "tools" in row for row in rows):
                return True
    return False


MOST_FILES = 50  # of a source, whose first rows are read
EMPTY = "has no rows; `source` must name a data file or folder with samples"


def missing_here(config: Ingest) -> dict[str, str]:
    """Mistakes in the sources, by field: unknown built-in sample, unknown or unreadable format, links that lead out.

    A header or first row of another form, and a source without rows, are reported too; so are columns that no source
    has, and a batch without its input or output. Missing sources are not.
    """
    sources = (config.source,) if isinstance(config.source, str) else config.source
    mistakes: list[str] = []
    empty: list[str] = []
    parts: list[Part] = []
    for source in sources:
        try:
            if is_builtin(source):
                check_builtin(source)
            elif Path(source).exists():
                firsts = list(_first_rows(Path(source), config, parts))
                mistakes += filter(None, firsts)
                if not firsts:
                    empty.append(source)
        except DataError as error:
            mistakes.append(str(error))
    if not mistakes and len(empty) == len(sources):
        mistakes = [f"{source}: {EMPTY}" for source in empty]
    mistakes = mistakes or mistakes_of_parts(parts, require_answers=config.require_answers)
    return {**({"source": "\n".join(mistakes)} if mistakes else {}), **_wrong_tools(config)}


def _wrong_tools(config: Ingest) -> dict[str, str]:
    """The mistake in the file default_tools, by the field; a missing file is not one."""
    if config.default_tools is not None and Path(config.default_tools).is_file():
        try:
            default_tools(Path(config.default_tools))
        except DataError as error:
            return {"default_tools": str(error)}
    return {}


def _first_rows(source: Path, config: Ingest, parts: list[Part]) -> Iterator[str]:
    """The mistake in the first row of each part, an empty string where there is none; the parts are added to `parts`.

    Raises DataError.
    """
    reading = config.reading()
    form = reading.form(source)
    if form == "image-folder":
        yield ""
    elif form == "arrow":
        from ops.ingest.tables import NEEDS_DATASETS, check_names  # loads pyarrow

        if importlib.util.find_spec("datasets") is None:
            raise DataError(f"{source}: {NEEDS_DATASETS}")
        check_names(source, config.allow_outside)
        yield ""
    else:
        found = reading.parts(source, form, with_bytes=False)
        parts += found
        for part in found[:MOST_FILES]:
            if part.batch == OUTPUT:
                yield ""
                continue
            for record in islice(part.records(), 1):
                mistake = record.mistake or row_mistake(record.row)
                yield f"{record.place}: {mistake}" if mistake else ""
