"""Records of Parquet files and Arrow data sets: the only module that imports pyarrow.

Both may unpack to far more than their size, so memory, rows and bytes are limited while they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from dsl.errors import DataError
from ops.ingest.compressed import too_much
from ops.ingest.records import Record
from ops.ingest.row_values import RESULT_PART, RESULT_ROLES, TURN_TEXTS, turn_role
from ops.lib.data.files import read_object
from ops.lib.data.limited_process import memory_limit

BATCH_ROWS, BATCH_BYTES = 32, 64 << 20  # a row may hold images of megabytes
BUFFER = 1 << 20  # of each column: a column of a row group may hold gigabytes
MOST_MEMORY = 2 << 30  # bytes, for a batch of rows
MOST_ROWS = 1_000_000  # and more only if a file has more bytes than rows
NEEDS_DATASETS = (
    "Arrow data sets are read by the library `datasets`, which is not installed: .venv/bin/pip install -c "
    "constraints.txt -e '.[datasets]' in dflow's folder"
)
BROKEN = (OSError, ValueError, KeyError, OverflowError, RecursionError, MemoryError, pyarrow.ArrowException)


def parquet_records(file: Path, *, with_bytes: bool = True) -> Iterator[Record]:
    """The rows of a Parquet file, a few at a time. with_bytes: include the binary columns.

    Raises DataError if it cannot be read, or unpacks to too much.
    """
    try:
        with parquet.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False) as opened:
            columns = None if with_bytes else _text_columns(opened)
            batches = opened.iter_batches(batch_size=_batch_rows(opened), columns=columns)
            total = max(opened.metadata.num_rows, 1)
            yield from _records(batches, str(file), file.parent, total, file.stat().st_size)
    except BROKEN as error:
        raise DataError(f"{file}: cannot be read as Parquet: {_why(error)}") from error


def arrow_records(folder: Path, allow_outside: bool = False) -> Iterator[tuple[str | None, Iterator[Record]]]:
    """Pairs of a division's name (or None) and its rows, from a folder written by
    `datasets.Dataset(Dict).save_to_disk`.

    allow_outside: the folder's files may be links that lead out of it; names of files elsewhere are still refused.
    Images stay encoded. Raises DataError without the library, and for a folder that it cannot read, that names files
    elsewhere, or that unpacks to too much.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{folder}: {NEEDS_DATASETS}") from error
    check_names(folder, allow_outside)
    size = sum(file.stat().st_size for file in folder.rglob("*.arrow"))
    try:
        with memory_limit(size + MOST_MEMORY):  # the files become part of the address space
            loaded = datasets.load_from_disk(str(folder))
    except BROKEN as error:
        raise DataError(f"{folder}: cannot be read as an Arrow data set: {_why(error)}") from error
    parts = loaded if isinstance(loaded, dict) else {None: loaded}
    for name, part in parts.items():
        place = f"{folder}: {name}" if name else str(folder)
        yield name, _arrow_rows(part, place, folder, size)


def check_names(folder: Path, allow_outside: bool) -> None:
    """Check that an Arrow data set's descriptions name only files inside it. Raises DataError.

    allow_outside: these files may be links that lead out of it.
    """
    for file in [folder / "dataset_dict.json", *sorted(folder.glob("**/state.json"))]:
        if file.is_file():
            described = read_object(file)
            named = (entry.get("filename") for entry in described.get("_data_files") or ())
            for name in [*named, *(described.get("splits") or ())]:
                is_plain = bool(name) and Path(str(name)).name == name
                if not is_plain or not (
                    allow_outside or (file.parent / name).resolve().is_relative_to(folder.resolve())
                ):
                    raise DataError(f"{file}: {str(name)[:200]!r} is no file or folder beside it")


def _arrow_rows(part: Any, place: str, folder: Path, size: int) -> Iterator[Record]:
    try:
        batches = part.with_format("arrow").iter(batch_size=BATCH_ROWS)
        yield from _records(batches, place, folder, max(len(part), 1), size)
    except BROKEN as error:
        raise DataError(f"{place}: cannot be read as an Arrow data set: {_why(error)}") from error


def _records(batches: Iterator[Any], place: str, folder: Path, total: int, size: int) -> Iterator[Record]:
    """The records of a file's rows. size: bytes of the file.

    Raises DataError for more rows or bytes than a file of this size can have.
    """
    number = unpacked = 0
    origin = f"{place}: row "
    while True:
        with memory_limit(MOST_MEMORY):
            batch = next(batches, None)
            if batch is None:
                return
            batch.validate(full=True)  # an offset outside its buffer reads other memory of the process, or ends it
            rows = batch.to_pylist()
        unpacked += batch.nbytes
        if number + len(rows) > max(MOST_ROWS, size) or too_much(size, unpacked):
            raise DataError(
                f"{origin}{number + 1}: {size} bytes unpack to {total} rows, and to {unpacked} bytes so far, which is "
                "too much for real data; write it as JSON lines if it is meant"
            )
        for row in rows:
            number += 1
            yield Record(number, origin, _without_nulls(row), "", folder, number / total)


OF_TOOLS = ("tools", "functions", "tools_json", "documents", "arguments", "parameters", "input")
LISTED = "function"  # tools of BFCL; of a call it is an object, whose arguments have a key of their own


def _without_nulls(value: Any, of_tools: bool = False) -> Any:
    """A row without null keys in its tools, documents, arguments of calls and results; others may mean what they say.

    A table's structs have every key of every row, most as null.
    """
    if isinstance(value, dict):
        is_result = turn_role(value) in RESULT_ROLES or value.get("type") == RESULT_PART
        return {
            key: _without_nulls(
                inner,
                of_tools
                or key in OF_TOOLS
                or (key == LISTED and isinstance(inner, list))
                or (is_result and key in TURN_TEXTS),
            )
            for key, inner in value.items()
            if not (of_tools and inner is None)
        }
    return [_without_nulls(each, of_tools) for each in value] if isinstance(value, list) else value


def _batch_rows(opened: parquet.ParquetFile) -> int:
    """The number of rows to read at once: BATCH_ROWS, or fewer if rows are large."""
    groups = [opened.metadata.row_group(place) for place in range(opened.num_row_groups)]
    row = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(row, 1)))


def _why(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"a few of its rows need more than {MOST_MEMORY >> 30} GiB of memory"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _text_columns(opened: parquet.ParquetFile) -> list[str]:
    """The names of the leaf columns that are not binary."""
    leaves = (opened.schema.column(place) for place in range(len(opened.schema)))
    return [leaf.path for leaf in leaves if leaf.physical_type != "BYTE_ARRAY" or leaf.logical_type.type == "STRING"]
