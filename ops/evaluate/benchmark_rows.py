"""The rows of a benchmark file, checked without a tokenizer, for `dflow plan`. Loads no torch.

A file has JSON lines or an array of JSON, packed with gzip or Zstandard or not, or is Parquet. All rows have the form
of the first one (ops/evaluate/benchmark_sets.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from dsl.errors import DataError
from ops.evaluate.benchmark_sets import form_of, function_files, set_row
from ops.evaluate.intervals import ALL
from ops.evaluate.op import Evaluate
from ops.ingest.image_values import ImageFinder, path_named
from ops.ingest.records import Record, json_records, records_in_turns
from ops.ingest.row_values import turn_role
from ops.ingest.rows import image_values, row_mistake, sample_of_row, turn_list
from ops.ingest.sample import ASKING, DroppedSample, RawSample
from ops.ingest.turn_forms import ROLE_NAMES
from ops.lib.data.files import shown_json
from ops.lib.data.sample_account import Unusable

CATEGORY = re.compile(r"[A-Za-z0-9][\w .-]*", re.ASCII)  # valid in a metric's name
UNSAFE = re.compile(r"[^A-Za-z0-9_. -]")
PARQUET = ".parquet"
SHOWN_MISTAKES = 100


@frozen
class Benchmark:
    """A benchmark file and how it is asked, with the fields benchmark_form, benchmark_prompt and first_turn."""

    file: Path
    form: str = "auto"
    prompt: str = "as-is"
    first_turn: bool = False

    @classmethod
    def of(cls, config: Evaluate) -> Benchmark:
        """The benchmark of a config that has one."""
        assert config.benchmark is not None
        return cls(Path(config.benchmark), config.benchmark_form, config.benchmark_prompt, config.first_turn)

    @property
    def category(self) -> str:
        """The category of rows without one: the file's name without its endings."""
        name = UNSAFE.sub("_", self.file.name.partition(".")[0])
        return name if CATEGORY.fullmatch(name) and name != ALL else "benchmark"


@frozen(eq=False)
class BenchmarkRow:
    """The prompt in a line of a benchmark. place: `file:line`. later: texts that are asked after it, each behind the
    target's answers to those before it.
    """

    place: str
    category: str
    sample: RawSample
    later: tuple[str, ...] = ()


@frozen
class Misfit:
    """A line of a benchmark that cannot be used, and the reason."""

    place: str
    mistake: str

    def __str__(self) -> str:
        return f"{self.place}: {self.mistake}"


def checked_rows(benchmark: Benchmark) -> list[BenchmarkRow]:
    """All rows of a benchmark without a mistake that shows in the file alone. Raises DataError as `refuse`."""
    rows = list(benchmark_rows(benchmark))
    refuse(benchmark.file, [row for row in rows if isinstance(row, Misfit)], len(rows))
    return [row for row in rows if isinstance(row, BenchmarkRow)]


def benchmark_rows(benchmark: Benchmark) -> Iterator[BenchmarkRow | Misfit]:
    """Read all rows of a benchmark.

    Raises DataError if the file is missing or cannot be unpacked, and for a form that cannot be asked.
    """
    if not benchmark.file.is_file():
        raise DataError(f"{benchmark.file}: no such file; benchmark must name a file of JSON lines")
    places: dict[str, str] = {}
    for record, later in _read(benchmark):
        mistake = record.mistake or _form_mistake(record.row) or _duplicate_id(record, places)
        if mistake:
            yield Misfit(record.place, mistake)
            continue
        places[str(record.row["id"])] = record.place
        yield _row(record, () if benchmark.first_turn else later)


def named_files(benchmark: Benchmark) -> Iterator[tuple[str, Path | None]]:
    """Every image that a row names by a path, as name and file; None if it is missing or not allowed.

    And the files of functions that rows of BFCL name by their classes.
    """
    for record in _records(benchmark.file) if benchmark.form in ("auto", "bfcl") else ():
        with suppress(ValueError):  # a mistake of the row
            for file in function_files(record.row, record.folder):
                yield f"{file.parent.name}/{file.name}", file
    for record, _ in _read(benchmark):
        if record.mistake or row_mistake(record.row):
            continue
        for name in filter(None, map(path_named, image_values(record.row))):
            try:
                image = ImageFinder(record.folder).file(name)
            except Unusable:
                image = None
            yield Path(name).as_posix(), image


def _read(benchmark: Benchmark) -> Iterator[tuple[Record, tuple[str, ...]]]:
    """Every record as one with a row that `ingest` reads, and the texts asked after it. Raises as `benchmark_rows`."""
    form = benchmark.form
    for record in _records(benchmark.file):
        if record.mistake:
            yield record, ()
            continue
        if form == "auto":
            form = form_of(record.row)
        if form in ("messages", "bfcl") and benchmark.prompt != "as-is":
            raise DataError(
                f'{benchmark.file}: benchmark_prompt = "{benchmark.prompt}" is for questions of GSM8K, MATH-500, '
                "HumanEval and files of turns; this one has messages, which are asked as they are: leave it out"
            )
        made = set_row(record, form, benchmark.category, by_z_lab=benchmark.prompt == "z-lab")
        if isinstance(made, str):
            yield evolve(record, mistake=made), ()
        else:
            [turned] = records_in_turns(iter([evolve(record, row=made.row)]))
            yield turned, made.later


def _records(file: Path) -> Iterator[Record]:
    """The records of a file by its ending; blank lines are skipped. Raises DataError for an unreadable file."""
    if file.suffix.lower() == PARQUET:
        from ops.ingest.tables import parquet_records  # here: a plan of JSON files loads no pyarrow

        return parquet_records(file)
    return json_records(file)


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


def _row(record: Record, later: tuple[str, ...]) -> BenchmarkRow | Misfit:
    """The prompt in a well-formed record, or why it cannot be used."""
    finder = ImageFinder(record.folder, remedy="copy it into the folder of the benchmark file")
    sample = sample_of_row(record.row, str(record.row["id"]), finder, require_answers=False)
    if isinstance(sample, DroppedSample):
        return Misfit(record.place, f"{sample.reason}: {sample.detail}" if sample.detail else sample.reason)
    if sample.turns[-1].role not in ASKING:
        return Misfit(
            record.place,
            "the last message is neither the user's nor a tool's result: remove the answer, which the target generates",
        )
    return BenchmarkRow(record.place, record.row["category"], sample, later)


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
        yield 'no user turn: "messages" must have one, {"role": "user", "content": "..."}'


def _duplicate_id(record: Record, places: dict[str, str]) -> str:
    place = places.get(str(record.row["id"]))
    return f'id "{record.row["id"]}" is already that of {place}; ids must differ' if place else ""
