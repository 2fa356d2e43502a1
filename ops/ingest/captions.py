"""The captions of a folder of images: metadata.jsonl, metadata.csv or metadata.parquet, as `datasets` has them.

A row names its image by `file_name`, relative to the file. Besides, it has one of the forms of ops/ingest/row_form.py,
or a caption as `text` or `caption`: the answer to the question about the image.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from ops.ingest.records import Record
from ops.ingest.row_form import first_value, turns_mistake

STEM, FILE_NAME, CAPTIONS = "metadata", "file_name", ("text", "caption")
NO_CAPTION = (
    f'no "{CAPTIONS[0]}" or "{CAPTIONS[1]}" beside "{FILE_NAME}": name the column of the captions so, or read only the '
    'images, with format = "image-folder"'
)


def is_metadata(file: Path) -> bool:
    return file.stem.lower() == STEM


def captioned(row: dict[str, Any], question: str) -> tuple[dict[str, Any], str]:
    """The row in a form that `ingest` reads, and the mistake in it, or an empty string."""
    if row.get(FILE_NAME) is None:
        return row, ""
    others = {key: value for key, value in row.items() if key != FILE_NAME}
    if first_value(row, ("image", "images")) is None:
        others["image"] = row[FILE_NAME]
    if not turns_mistake(others):
        return others, ""
    if not any(name in row for name in CAPTIONS):
        return row, NO_CAPTION
    kept = {key: value for key, value in others.items() if key not in CAPTIONS}
    return {**kept, "prompt": question, "completion": first_value(row, CAPTIONS)}, ""


def captioned_records(records: Iterator[Record], question: str) -> Iterator[Record]:
    for record in records:
        if record.mistake or not isinstance(record.row, dict):
            yield record
            continue
        row, mistake = captioned(record.row, question)
        yield attrs.evolve(record, row=row, mistake=mistake)
