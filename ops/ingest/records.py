"""Records of JSON and CSV files, and of the captions in a folder of images; they are read as a stream.

JSON    one object a line, or one array of objects. The number of a record, which is the id of a row without one, is
        its line; in an array whose first two elements share a line, as `json.dump` writes it, the place of the element.
CSV     the first line names the columns, and each row is an object of texts. An empty field is null; columns without a
        name, such as the index that pandas writes, are left out.
captions    metadata.jsonl, metadata.csv or metadata.parquet, as `datasets` has them. A row names its image by
        `file_name`, relative to the file. Besides, it has a form of ops/ingest/rows.py, or a caption as `text` or
        `caption`: the answer to the question about the image.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import attrs
from attrs import frozen

from dsl.errors import DataError, shortened
from ops.ingest.row_forms import form_of, in_turns
from ops.ingest.row_values import first_value
from ops.ingest.rows import turns_mistake
from ops.lib.data.json_lines import TOO_DEEP, bounded_lines, parse_line, what_is_broken

CHUNK = 1 << 20
LONGEST = 64 << 20  # bytes of a line, or characters of an element of an array: images are better files of their own
TOO_LONG = f"longer than {LONGEST >> 20} MiB; is it one sample? Its images can be files, named by their paths"
SPACE = re.compile(r"[\s,]*")
Numbered = tuple[int, int, Any, str]  # line or place, bytes read, value, mistake


@frozen
class Record:
    """One row of a source, or the mistake in it.

    number  within the file, from 1: the line, the row, or the element of an array
    origin  the text before the number in messages: "file:", "file: row ", or "file: element "
    folder  the start of relative image paths
    share   of the file read so far, 0..1
    """

    number: int
    origin: str
    row: Any
    mistake: str
    folder: Path
    share: float

    @property
    def place(self) -> str:
        return f"{self.origin}{self.number}"


def json_records(file: Path) -> Iterator[Record]:
    """The records of a JSON file; blank lines are skipped. Raises DataError for an unreadable file."""
    try:
        size = max(file.stat().st_size, 1)
        if _first_character(file) == b"[":
            origin, rows = _numbered(file, _elements(file))
        else:
            origin, rows = f"{file}:", _lines(file)
        for number, end, row, mistake in rows:
            yield Record(number, origin, row, mistake, file.parent, min(end / size, 1.0))
    except OSError as error:
        raise DataError(
            f"{file}: cannot be read ({error.strerror}); `source` must name a data file or folder"
        ) from error


def _first_character(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1]


def _numbered(file: Path, elements: Iterator[Numbered]) -> tuple[str, Iterator[Numbered]]:
    """The origin text for an array's elements, and the elements, numbered by lines or by places."""
    first = list(islice(elements, 2))
    every = chain(first, elements)
    if len(first) == 2 and first[0][0] == first[1][0] and not first[1][-1]:
        return f"{file}: element ", ((place, *each[1:]) for place, each in enumerate(every, start=1))
    return f"{file}:", every


def _lines(file: Path) -> Iterator[Numbered]:
    """The line number, bytes read, value and mistake of every line that is not blank. A line too long ends
    the reading.
    """
    read = 0
    for number, line in bounded_lines(file, LONGEST):
        read += len(line)
        if len(line) > LONGEST:
            yield number, read, None, TOO_LONG
            return
        stripped = line.removeprefix(codecs.BOM_UTF8).strip()
        if stripped:
            yield number, read, *parse_line(stripped)


def _elements(file: Path) -> Iterator[Numbered]:
    """The line, bytes read, value and mistake of every array element. A broken element ends the reading."""
    with file.open("rb") as opened:
        text = _ArrayText(opened)
        try:
            text.enter()
            while text.peek() not in ("]", ""):
                number = text.line
                value, mistake = text.element()
                yield number, opened.tell(), value, mistake
                if mistake:
                    return
            if not text.peek():
                yield text.line, opened.tell(), None, 'broken JSON: the array has no end ("]")'
        except UnicodeDecodeError:
            yield text.line, opened.tell(), None, "not UTF-8 in the text that begins here"


class _ArrayText:
    """The text of an array after its "[", read piece by piece. line: of the next element, from 1."""

    def __init__(self, opened: BinaryIO) -> None:
        self.line = 1
        self._opened = opened
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._start, self._ended = "", 0, False

    def enter(self) -> None:
        """Skip the "[" that begins the array, and white space before it."""
        self.peek()
        self._skip(self._start + 1)

    def peek(self) -> str:
        """The first character of the next element, "]", or an empty string at the end of the file."""
        while True:
            space = SPACE.match(self._text, self._start)
            assert space is not None  # an empty text matches
            self._skip(space.end())
            if self._start < len(self._text) or self._ended:
                return self._text[self._start : self._start + 1]
            self._more(CHUNK)

    def element(self) -> tuple[Any, str]:
        """The next element of the array, or the mistake in it; more text is read until the element ends."""
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._text, self._start)
            except json.JSONDecodeError as error:
                length = len(self._text) - self._start
                if self._ended:
                    return None, f"broken JSON in the element that begins here: {what_is_broken(error)}"
                if length > LONGEST:
                    return None, f"broken JSON in the element that begins here ({what_is_broken(error)}), or {TOO_LONG}"
                self._more(max(CHUNK, min(length, LONGEST + 1 - length)))
                continue
            except ValueError as error:
                return None, f"broken JSON: {error}"
            except RecursionError:
                return None, TOO_DEEP
            self._skip(end)
            return value, ""

    def _more(self, size: int) -> None:
        raw = self._opened.read(size)
        self._ended = not raw
        self._text = self._text[self._start :] + self._decoder.decode(raw, final=self._ended)
        self._start = 0

    def _skip(self, end: int) -> None:
        self.line += self._text.count("\n", self._start, end)
        self._start = end


STEM, FILE_NAME, CAPTIONS = "metadata", "file_name", ("text", "caption")
NO_CAPTION = (
    f'no "{CAPTIONS[0]}" or "{CAPTIONS[1]}" beside "{FILE_NAME}": name the column of the captions so, or read only the '
    'images, with format = "image-folder"'
)


def is_metadata(file: Path) -> bool:
    return file.stem.lower() == STEM


def captioned(row: dict[str, Any], question: str) -> tuple[dict[str, Any], str]:
    """The row in a form that `ingest` reads, and the mistake in it, "" for none. question: for rows with captions."""
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


def records_in_turns(records: Iterator[Record]) -> Iterator[Record]:
    """The records, their rows as rows of turns and tools (ops/ingest/row_forms.py)."""
    for record in records:
        if record.mistake or not isinstance(record.row, dict):
            yield record
            continue
        row, mistake = in_turns(record.row)
        yield record if row is record.row and not mistake else attrs.evolve(record, row=row, mistake=mistake)


def captioned_records(records: Iterator[Record], question: str) -> Iterator[Record]:
    for record in records:
        if record.mistake or not isinstance(record.row, dict):
            yield record
            continue
        row, mistake = captioned(record.row, question)
        yield attrs.evolve(record, row=row, mistake=mistake)


DELIMITERS = {".csv": ",", ".tsv": "\t"}
MOST_COLUMNS = 1000


def csv_records(file: Path) -> Iterator[Record]:
    """The rows of a CSV file; blank lines are skipped. A row has the number of the line where it begins.

    A broken row ends the reading, since the next one cannot be found. Raises DataError for an unreadable file.
    """
    try:
        size = max(file.stat().st_size, 1)
        rows = _Rows(file)
        header = next(rows, None)
        if header is None:
            return
        number, columns, mistake = header
        mistake = mistake or _header_mistake(file, columns)
        if mistake:
            yield Record(number, f"{file}:", None, mistake, file.parent, 1.0)
            return
        for number, fields, mistake in rows:
            if not mistake and len(fields) != len(columns):
                mistake = f"{len(fields)} fields, and the first line names {len(columns)} columns; quote texts with "
                mistake += "delimiters or line breaks"
            row = {name: field or None for name, field in zip(columns, fields, strict=False) if name}
            yield Record(number, f"{file}:", row, mistake, file.parent, min(rows.read / size, 1.0))
    except OSError as error:
        raise DataError(
            f"{file}: cannot be read ({error.strerror}); `source` must name a data file or folder"
        ) from error


def names_rows(file: Path) -> bool:
    """Whether a CSV file has the columns of rows that ingest reads; other CSV files may lie beside images."""
    try:
        _, columns, mistake = next(_Rows(file), (0, [], "empty"))
    except OSError:
        return False
    if is_metadata(file) and FILE_NAME in columns:
        return True  # a mistake in it is reported, since captions would be lost
    return not (mistake or _header_mistake(file, columns))


class _Rows(Iterator[tuple[int, list[str], str]]):
    """An iterator over rows that are not blank, as line number, fields and mistake. read: bytes so far."""

    def __init__(self, file: Path) -> None:
        self.read = 0
        self._begin = 0  # bytes before the row
        self._is_broken = False
        csv.field_size_limit(LONGEST)
        self._reader = csv.reader(self._lines(file), delimiter=DELIMITERS.get(file.suffix.lower(), ","), strict=True)

    def __next__(self) -> tuple[int, list[str], str]:
        if self._is_broken:
            raise StopIteration
        fields: list[str] = []
        while not fields:
            number, self._begin = self._reader.line_num + 1, self.read
            try:
                fields = next(self._reader)
            except (csv.Error, ValueError) as error:
                self._is_broken = True
                return number, [], _why(error)
        return number, fields, ""

    def _lines(self, file: Path) -> Iterator[str]:
        """The decoded lines of the file. Raises ValueError in a row that is too long, and for text that is
        not UTF-8.
        """
        for number, line in bounded_lines(file, LONGEST):
            self.read += len(line)
            if self.read - self._begin > LONGEST:
                raise ValueError(TOO_LONG)
            yield (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode("utf-8")


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start + 1} of a line of the row that begins here"
    if isinstance(error, csv.Error):
        return f"broken CSV in the row that begins here: {error}"
    return str(error)


def _header_mistake(file: Path, columns: list[str]) -> str:
    if len(columns) > MOST_COLUMNS:
        return f"{len(columns)} columns, more than {MOST_COLUMNS}"
    named = [name for name in columns if name]
    again = next((name for place, name in enumerate(named) if name in named[:place]), None)
    if again is not None:
        return f'two columns are named "{shortened(again)}"'
    example: dict[str, Any] = dict.fromkeys(named, "text")
    if is_metadata(file) and FILE_NAME in named:
        return captioned(example, "text")[1]
    if form_of(example) is None and (mistake := turns_mistake(example)):
        return f"{mistake}; the first line must name the columns, and it is {shortened(', '.join(named))}"
    return ""
