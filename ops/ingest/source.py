"""A source on disk: its format, its parts, and the split of each part."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.errors import DataError
from ops.ingest.columns import applies
from ops.ingest.compressed import MAGIC, data_suffix, head_of, plain_name
from ops.ingest.image_values import IMAGE_NAMES
from ops.ingest.op import Columns
from ops.ingest.records import (
    DELIMITERS,
    Record,
    captioned_records,
    csv_records,
    is_metadata,
    json_records,
    mapped_records,
    names_rows,
    records_in_turns,
)
from ops.ingest.traffic import (
    INPUT,
    NO_ANSWERS,
    OUTPUT,
    OUTPUT_ALONE,
    Answer,
    Answers,
    batch_answers,
    batch_kind,
    exchanges,
)

BUILTIN = "builtin:digits"
JSON_NAMES = (".jsonl", ".json", ".ndjson")
CSV_NAMES = tuple(DELIMITERS)
SUFFIXES = {"json": JSON_NAMES, "csv": CSV_NAMES, "parquet": (".parquet",)}  # of the files of rows
ARROW_FILES = ("dataset_dict.json", "state.json")  # what `save_to_disk` writes for a DatasetDict, and for a Dataset
SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}
NAMED = re.compile(rf"({'|'.join(sorted(SPLIT_NAMES, key=len, reverse=True))})(?![a-z])", re.IGNORECASE)
PICKLES = (".pkl", ".pickle")
OTHER_MAGIC = (b"PK\x03\x04", b"BZh", b"\xfd7zXZ")  # zip, bzip2, xz
REMEDY = 'say which: format = "json", "csv", "parquet", "arrow" or "image-folder"'


class UnknownFormat(DataError):
    """An error for data whose format cannot be told. found: what is there. otherwise: a remedy besides naming the
    format.
    """

    def __init__(self, found: str, otherwise: str = "") -> None:
        super().__init__(found, otherwise)
        self.found, self.otherwise = found, otherwise

    def __str__(self) -> str:
        return self.with_remedy(REMEDY)

    def with_remedy(self, remedy: str) -> str:
        """The message with a remedy that replaces "set `format`"; "" for none."""
        remedies = [each for each in (remedy, self.otherwise) if each]
        return "; ".join([self.found, *([", or ".join(remedies)] if remedies else [])])


@frozen
class Part:
    """A part of a source: a file, or one division of an Arrow data set.

    split: by its name, or None. name: for the ids of its rows. place: in messages. raw: the rows as they are. columns,
    question: as in the config. first: its first row, where the config or the format needs it, else None. is_captions:
    of a folder of images.
    """

    name: str
    split: str | None
    place: str
    raw: Callable[[], Iterator[Record]]
    question: str = ""
    columns: Columns | None = None
    first: Any = None
    is_captions: bool = False

    @property
    def batch(self) -> str:
        """INPUT or OUTPUT of one of OpenAI's batches; "" for other files."""
        return batch_kind(self.first)

    def records(self, answers: Answers = NO_ANSWERS) -> Iterator[Record]:
        """The rows as those of turns. answers: to the lines of a batch's input."""
        records = self.raw()
        if self.columns is not None:
            records = mapped_records(records, self.columns, self.question)
        records = records_in_turns(exchanges(records, answers))
        return captioned_records(records, self.question) if self.is_captions else records


def check_builtin(source: str) -> None:
    """Check that a built-in sample of this name exists. Raises DataError."""
    if source != BUILTIN:
        raise DataError(f'source "{source}": the only built-in sample is "{BUILTIN}"')


def find_format(source: Path, wanted: str, columns: Columns | None = None) -> str:
    """The format of a source. Raises DataError if it is missing, or of an unknown format.

    wanted, columns: the config's `format` and `columns`; "auto" tells it by the content.
    """
    if not source.exists():
        raise DataError(f"{source}: no such file or folder; `source` must name a data file or folder")
    if wanted == "auto":
        return _format_of_folder(source, columns) if source.is_dir() else _format_of_file(source)
    if wanted in ("arrow", "image-folder") and not source.is_dir():
        raise DataError(f'{source}: format = "{wanted}" reads a folder, but this is a file')
    return wanted


def parts_of(
    source: Path,
    form: str,
    *,
    with_bytes: bool = True,
    allow_outside: bool = False,
    question: str = "",
    columns: Columns | None = None,
) -> Iterator[Part]:
    """The parts of a source of rows, in order.

    with_bytes: include the binary columns of Parquet files. allow_outside: files of a folder may be links that lead
    out. question: the one that image captions, and mapped answers without a question, answer. columns: those of rows.
    """
    read: Callable[[Path], Iterator[Record]] = json_records
    if form == "csv":
        read = partial(csv_records, columns=columns)
    elif form != "json":
        from ops.ingest.tables import arrow_records, parquet_records  # here: a plan of JSON files loads no pyarrow

        if form == "arrow":
            for name, records in arrow_records(source, allow_outside):
                yield Part(name or "", split_named(name or ""), str(source), _giving(records), question, columns)
            return
        read = partial(parquet_records, with_bytes=with_bytes or columns is not None)
    suffixes = SUFFIXES[form]
    files = _files(source, suffixes) if source.is_dir() else [source]
    if source.is_dir() and not allow_outside:
        _check_inside(files, source)
    if not files:
        raise DataError(f'{source}: has no file that ends in {", ".join(suffixes)} (format = "{form}")')
    for file in files:
        name = ""
        if len(files) > 1:
            name = file.relative_to(source).with_name(Path(plain_name(file)).stem).as_posix()
        raw = partial(read, file)
        first = next(raw(), None) if form == "json" or columns is not None else None
        yield Part(
            name=name,
            split=split_named(name),
            place=str(file),
            raw=raw,
            question=question,
            columns=columns,
            first=None if first is None else first.row,
            is_captions=is_metadata(file),
        )


def answers_of(parts: list[Part], mistakes: list[str]) -> Answers:
    """The answers in those of the parts that are outputs of batches; adds the mistakes in them."""
    answers: dict[str, Answer] = {}
    places: dict[str, str] = {}
    for part in parts:
        if part.batch == OUTPUT:
            mistakes += batch_answers(part.raw(), answers, places)
    return answers


def mistakes_of_parts(parts: list[Part], *, require_answers: bool) -> list[str]:
    """The mistakes that show in the first rows of all parts of all sources together."""
    of_batches = {kind: [part.place for part in parts if part.batch == kind] for kind in (INPUT, OUTPUT)}
    if of_batches[OUTPUT] and not of_batches[INPUT]:
        return [f"{place}: {OUTPUT_ALONE}" for place in of_batches[OUTPUT]]
    if of_batches[INPUT] and not of_batches[OUTPUT] and require_answers:
        return [f"{place}: {INPUT_ALONE}" for place in of_batches[INPUT]]
    columns = next((part.columns for part in parts), None)
    if columns is not None and not any(part.first is None or applies(columns, part.first) for part in parts):
        names = ", ".join(f'"{column}"' for column in columns.given.values())
        return [f"{parts[0].place}: its rows have none of `columns`, {names}, and need none: correct or remove it"]
    return []


INPUT_ALONE = (
    "the input of a batch, which has no answers: list the batch's output as a source too, "
    'source = ["input.jsonl", "output.jsonl"], or set require_answers = false, and let regenerate_answers answer'
)


def metadata_files(folder: Path) -> list[Path]:
    """The caption files in a folder of images."""
    return [file for suffixes in SUFFIXES.values() for file in _files(folder, suffixes) if is_metadata(file)]


def _giving(records: Iterator[Record]) -> Callable[[], Iterator[Record]]:
    return lambda: records


def split_named(name: str) -> str | None:
    """The split in a name such as "train-00000-of-00004", "data/validation" or "test_sft"; None for other names."""
    found = [match for step in name.split("/") if (match := NAMED.match(step))]
    return SPLIT_NAMES[found[-1][1].lower()] if found else None


def _check_inside(files: list[Path], source: Path) -> None:
    """Check that no link leads out of the source, except to the Hub's cache beside it. Raises DataError."""
    own = source.resolve()
    blobs = own.parent.parent / "blobs" if own.parent.name == "snapshots" else own
    for file in files:
        leads_to = file.resolve()
        if not (leads_to.is_relative_to(own) or leads_to.is_relative_to(blobs)):
            raise DataError(
                f"{file}: is a link that leads out of {source}, to {leads_to}; set allow_outside = true "
                "(dflow init: --allow-outside) if you trust the folder"
            )


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a format in a folder and its subfolders, also compressed, except those that `datasets` and the Hub
    add.
    """
    found = [file for pattern in ("*", "*/*") for file in folder.glob(pattern) if data_suffix(file) in suffixes]
    described = ("dataset_info.json", "dataset_infos.json", *ARROW_FILES)
    relative = (file for file in found if file.name not in described and file.is_file())
    return sorted(file for file in relative if not any(step.startswith(".") for step in file.relative_to(folder).parts))


def _format_of_file(file: Path) -> str:
    for form, suffixes in (("json", JSON_NAMES), ("csv", CSV_NAMES)):
        if data_suffix(file) in suffixes:
            return form
    if file.suffix.lower() in PICKLES:
        raise DataError(
            f"{file}: a pickle, which may run code when it is read; let SGLang write its requests with --log-requests "
            "--log-requests-level 3 --log-requests-format json"
        )
    try:
        with file.open("rb") as opened:
            packed = opened.read(8)
    except OSError as error:
        raise DataError(
            f"{file}: cannot be read ({error.strerror}); `source` must name a data file or folder"
        ) from error
    if packed[:4] == b"PAR1":
        return "parquet"
    if file.suffix.lower() == ".arrow" or packed[:6] == b"ARROW1":
        raise DataError(f"{file}: a file of an Arrow data set; name the folder that `save_to_disk` wrote")
    head = head_of(file, 4096)
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        return "json"
    if packed.startswith((*MAGIC, *OTHER_MAGIC)):
        raise DataError(f"{file}: compressed; unpack it first")
    raise UnknownFormat(f"{file}: neither JSON, Parquet nor CSV")


def _format_of_folder(folder: Path, columns: Columns | None) -> str:
    """The format of a folder: Arrow by its description; else files of rows, with or without images; else images."""
    if any((folder / name).is_file() for name in ARROW_FILES):
        return "arrow"
    found = [name for form, name in (("json", "JSON"), ("parquet", "Parquet")) if _files(folder, SUFFIXES[form])]
    tables = _files(folder, CSV_NAMES)
    if any(names_rows(file, columns) for file in tables):
        found.append("CSV")
    if len(found) > 1:
        raise UnknownFormat(f"{folder}: contains {' files and '.join(found)} files", "name one file")
    if found:
        return found[0].lower()
    below = (file for pattern in ("*", "*/*", "*/*/*", "*/*/*/*") for file in folder.glob(pattern))
    if any(file.suffix.lower() in IMAGE_NAMES for file in below):
        return "image-folder"
    if tables:
        return "csv"  # whose mistake is then named
    raise UnknownFormat(f"{folder}: contains neither JSON, Parquet nor CSV files, no Arrow data set and no images")
