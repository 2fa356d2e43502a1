"""The rows of a benchmark file, checked without a tokenizer, for `dflow plan`. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.errors import DataError
from ops.evaluate.intervals import ALL
from ops.ingest.image_values import ImageFinder
from ops.ingest.records import Record, json_records, records_in_turns
from ops.ingest.row_values import turn_role
from ops.ingest.rows import row_mistake, sample_of_row, turn_list
from ops.ingest.sample import DroppedSample, RawSample
from ops.ingest.turn_forms import ROLE_NAMES
from ops.lib.data.files import shown_json

CATEGORY = re.compile(r"[A-Za-z0-9][\w .-]*", re.ASCII)  # valid in a metric's name
SHOWN_MISTAKES = 100


@frozen(eq=False)
class BenchmarkRow:
    """The prompt in a line of a benchmark. place: `file:line`."""

    place: str
    category: str
    sample: RawSample


@frozen
class Misfit:
    """A line of a benchmark that cannot be used, and the reason."""

    place: str
    mistake: str

    def __str__(self) -> str:
        return f"{self.place}: {self.mistake}"


def check_benchmark(file: Path) -> None:
    """Check a benchmark for mistakes that show in the file alone. Raises DataError as `refuse`."""
    rows = list(benchmark_rows(file))
    refuse(file, [row for row in rows if isinstance(row, Misfit)], len(rows))


def benchmark_rows(file: Path) -> Iterator[BenchmarkRow | Misfit]:
    """Read all lines of a benchmark that are not blank. Raises DataError if the file is missing."""
    if not file.is_file():
        raise DataError(f"{file}: no such file; benchmark must name a file of JSON lines")
    places: dict[str, str] = {}
    for record in records_in_turns(json_records(file)):
        mistake = record.mistake or _form_mistake(record.row) or _duplicate_id(record, places)
        if mistake:
            yield Misfit(record.place, mistake)
            continue
        places[str(record.row["id"])] = record.place
        yield _row(record)


def refuse(file: Path, misfits: Sequence[Misfit], rows: int) -> None:
    """Raise DataError if lines are unusable, listing them, or if there are no lines. rows: number of all lines."""
    if misfits:
        more = [f"... and {len(misfits) - SHOWN_MISTAKES} more"] if len(misfits) > SHOWN_MISTAKES else []
        raise DataError(
            "\n".join(
                [
                    f"{len(misfits)} of {rows} lines of the benchmark cannot be used: fix or remove them "
                    "(docs/evaluation.md has the format)",
                    *map(str, misfits[:SHOWN_MISTAKES]),
                    *more,
                ]
            )
        )
    if not rows:
        raise DataError(f"{file}: has no prompts; write one JSON object per line (docs/evaluation.md)")


def _row(record: Record) -> BenchmarkRow | Misfit:
    """The prompt in a well-formed record, or why it cannot be used."""
    finder = ImageFinder(record.folder, remedy="copy it into the folder of the benchmark file")
    sample = sample_of_row(record.row, str(record.row["id"]), finder, require_answers=False)
    if isinstance(sample, DroppedSample):
        return Misfit(record.place, f"{sample.reason}: {sample.detail}" if sample.detail else sample.reason)
    if sample.turns[-1].role != "user":
        return Misfit(record.place, "the last message is not the user's: remove the answer, which the target generates")
    return BenchmarkRow(record.place, record.row["category"], sample)


def _form_mistake(row: Any) -> str:
    """The mistake in a row of a benchmark, by the rules of all data files and those of a benchmark; "" for none."""
    return row_mistake(row) or next(_lacking(row), "")


def _lacking(row: dict[str, Any]) -> Iterator[str]:
    if row.get("id") is None or not str(row["id"]).strip():
        yield 'no "id": give each prompt its own, by which results of two drafts are compared'
    category = row.get("category")
    if not isinstance(category, str) or not CATEGORY.fullmatch(category):
        yield (
            f'"category" must be a word, of letters, digits, blanks and "_.-", by which results are grouped, got '
            f"{shown_json(category)}"
        )
    if category == ALL:
        yield f'"category" must not be "{ALL}", which means all categories'
    if not any(ROLE_NAMES.get(turn_role(turn)) == "user" for turn in turn_list(row)):
        yield 'no user turn: "messages" must end with a turn of the user, {"role": "user", "content": "..."}'


def _duplicate_id(record: Record, places: dict[str, str]) -> str:
    place = places.get(str(record.row["id"]))
    return f'id "{record.row["id"]}" is already that of {place}; ids must differ' if place else ""
