"""Whether a file of prompts holds any, before anything runs."""

from __future__ import annotations

from dsl.errors import DataError
from dsl.op import is_builtin
from ops.ingest.op import Ingest
from ops.ingest.read import read_samples
from ops.ingest.sample import DroppedSample
from ops.ingest.source import REMEDY

SHOWN = 5
OF_FORMAT = "say which: -s ingest.format=json (or csv, parquet, arrow, image-folder)"
FORMS = '{"prompt": "..."}, or "messages" that end with a turn of the user, with or without an answer after it'


def check_prompts(config: Ingest) -> None:
    """Raises DataError that names the file where it cannot be read, has a broken row, or no prompt."""
    if is_builtin(str(config.source)):
        return
    reading = config.reading()
    named = ", ".join(map(str, reading.sources))
    dropped: list[DroppedSample] = []
    usable = 0
    try:
        for _, sample in read_samples(reading):
            if not isinstance(sample, DroppedSample):
                usable += 1
            elif len(dropped) < SHOWN:
                dropped.append(sample)
    except DataError as error:
        raise DataError(str(error).replace(REMEDY, OF_FORMAT)) from None
    if usable:
        return
    if not dropped:
        raise DataError(f"{named} is empty; write one JSON object per line: {FORMS}")
    raise DataError("\n".join([f"{named} has no usable prompt; write {FORMS}", *map(_line, dropped)]))


def _line(sample: DroppedSample) -> str:
    return f'  sample "{sample.id}": {sample.reason}' + (f" ({sample.detail})" if sample.detail else "")
