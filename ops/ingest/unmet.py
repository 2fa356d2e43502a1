"""Sources that cannot be read, before a run's first stage."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from dsl.errors import DataError
from dsl.op import is_builtin
from ops.ingest.op import Ingest
from ops.ingest.row_form import row_mistake
from ops.ingest.source import check_builtin, find_format, parts_of

MOST_FILES = 50  # of a source, whose first rows are read
EMPTY = "has no rows; `source` must name a data file or folder with samples"


def unmet(config: Ingest) -> dict[str, str]:
    """An unknown built-in sample, a format that cannot be told or read, links that lead out, a header or first row of
    another form, and sources without rows. Missing sources are reported elsewhere.
    """
    sources = (config.source,) if isinstance(config.source, str) else config.source
    mistakes: list[str] = []
    empty: list[str] = []
    for source in sources:
        try:
            if is_builtin(source):
                check_builtin(source)
            elif Path(source).exists():
                firsts = list(_first_rows(Path(source), config))
                mistakes += filter(None, firsts)
                if not firsts:
                    empty.append(source)
        except DataError as error:
            mistakes.append(str(error))
    if not mistakes and len(empty) == len(sources):
        mistakes = [f"{source}: {EMPTY}" for source in empty]
    return {"source": "\n".join(mistakes)} if mistakes else {}


def _first_rows(source: Path, config: Ingest) -> Iterator[str]:
    """The mistake in the first row of each part, an empty string where there is none. Raises DataError."""
    form = find_format(source, config.format)
    if form == "image-folder":
        yield ""
    elif form == "arrow":
        from ops.ingest.tables import NEEDS_DATASETS, check_names  # loads pyarrow

        if importlib.util.find_spec("datasets") is None:
            raise DataError(f"{source}: {NEEDS_DATASETS}")
        check_names(source, config.allow_outside)
        yield ""
    else:
        for part in islice(
            parts_of(source, form, with_bytes=False, allow_outside=config.allow_outside, question=config.question),
            MOST_FILES,
        ):
            for record in islice(part.records(), 1):
                mistake = record.mistake or row_mistake(record.row)
                yield f"{record.place}: {mistake}" if mistake else ""
