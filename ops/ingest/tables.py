"""Records of Parquet files and Arrow data sets: the only module that imports pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from dsl.errors import DataError
from ops.ingest.records import Record

BATCH_ROWS = 32  # a row may hold images of megabytes
BUFFER = 1 << 20  # of each column: a column of a row group may hold gigabytes
NEEDS_DATASETS = (
    "Arrow data sets are read by the library `datasets`, which is not installed: .venv/bin/pip install -c "
    "constraints.txt -e '.[datasets]' in dflow's folder"
)


def parquet_records(file: Path, *, with_bytes: bool = True) -> Iterator[Record]:
    """The rows of a Parquet file, a few at a time; with_bytes: with the binary columns.

    Raises DataError if it cannot be read.
    """
    try:
        with parquet.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False) as opened:
            columns = None if with_bytes else _text_columns(opened)
            batches = opened.iter_batches(batch_size=BATCH_ROWS, columns=columns)
            total = max(opened.metadata.num_rows, 1)
            yield from _records(batches, str(file), file.parent, total)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{file}: cannot be read as Parquet: {error}") from error


def arrow_records(folder: Path) -> Iterator[tuple[str | None, Iterator[Record]]]:
    """(Name of the division or None, its rows) of a folder that `datasets.Dataset(Dict).save_to_disk` wrote.

    Images stay encoded. Raises DataError without the library, and for a folder it cannot read.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{folder}: {NEEDS_DATASETS}") from error
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise DataError(f"{folder}: cannot be read as an Arrow data set: {error}") from error
    parts = loaded if isinstance(loaded, dict) else {None: loaded}
    for name, part in parts.items():
        batches = part.with_format("arrow").iter(batch_size=BATCH_ROWS)
        place = f"{folder}: {name}" if name else str(folder)
        yield name, _records(batches, place, folder, max(len(part), 1))


def _records(batches: Iterator[Any], place: str, folder: Path, total: int) -> Iterator[Record]:
    number, origin = 0, f"{place}: row "
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield Record(number, origin, row, "", folder, number / total)


def _text_columns(opened: parquet.ParquetFile) -> list[str]:
    """The leaf columns that are not binary."""
    leaves = (opened.schema.column(place) for place in range(len(opened.schema)))
    return [leaf.path for leaf in leaves if leaf.physical_type != "BYTE_ARRAY" or leaf.logical_type.type == "STRING"]
