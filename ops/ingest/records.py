"""Records of JSON and CSV files, and of the captions in a folder of images; they are read as a stream.

JSON    one object a line, or one array of objects, also as the "data" of one object. The number of a record, which is
        the id of a row without one, is its line; in an array whose first two elements share a line, as `json.dump`
        writes it, the place of the element.
CSV     the first line names the columns, between commas, semicolons or tabs, and each row is an object of texts. An
        empty field is null; columns without a name, such as the index that pandas writes, are left out.
captions    metadata.jsonl, metadata.csv or metadata.parquet, as `datasets` has them. A row names its image by
        `file_name`, relative to the file, or several by `file_names`. Besides, it has a form of ops/ingest/rows.py, or
        a caption as `text` or `caption`: the answer to the question about the image.
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
from ops.ingest.columns import FILE_NAMES, applies, mapped
from ops.ingest.compressed import Data, data_suffix, head_of, open_data, plain_name
from ops.ingest.op import Columns
from ops.ingest.row_forms import form_of, in_turns
from ops.ingest.row_values import first_value
from ops.ingest.rows import ANSWERS, KEYS, TURNS, turns_mistake
from ops.lib.data.json_lines import TOO_DEEP, lines_of, parse_line, what_is_broken

CHUNK = 1 << 20
LONGEST = 64 << 20  # bytes of a line, or characters of an element of an array: images are better files of their own
TOO_LONG = f"longer than {LONGEST >> 20} MiB; is it one sample? Its images can be files, named by their paths"
CUT_LINE = (
    "; it is the last line, without a line break, as of a log that is still written: remove it, or read a whole copy"
)
SPACE = re.compile(r"[\s,]*")
HEAD = 1 << 16  # bytes that an object around the rows may have before its "data", and characters behind it
KEY = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')
OBJECTS = re.compile(r"\[\s*[{\]]")
BEHIND_DATA = (
    'more than the rest of an object behind the list "data": such a list holds all rows of a file; else write one '
    "object a line"
)
Numbered = tuple[int, Any, str]  # line or place, value, mistake


@frozen
class Record:
    """One row of a source, or the mistake in it.

    number  within the file, from 1: the line, the row, or the element of an array
    origin  the text before the number in messages: "file:", "file: row ", or "file: element "
    folder  the start of relative image paths
    share   of the file read so far, 0..1
    lacks   why a request of a server has no answer to learn from (ops/ingest/traffic.py); "" where that does not count
    is_request  whether it is one, perhaps with the earlier turns of a conversation whose requests are in other rows
    """

    number: int
    origin: str
    row: Any
    mistake: str
    folder: Path
    share: float
    lacks: str = ""
    is_request: bool = False

    @property
    def place(self) -> str:
        return f"{self.origin}{self.number}"


def json_records(file: Path) -> Iterator[Record]:
    """The records of a JSON file; blank lines are skipped. Raises DataError as `open_data`."""
    head = head_of(file, HEAD)
    before = 0 if _first_character(head) == b"[" else _before_data(head)
    with open_data(file) as data:
        if before is None:
            origin, rows = f"{file}:", _lines(data.file)
        else:
            origin, rows = _numbered(file, _elements(data.file, before))
        for number, row, mistake in rows:
            yield Record(number, origin, row, mistake, file.parent, data.share)


def _first_character(head: bytes) -> bytes:
    return head.removeprefix(codecs.BOM_UTF8).lstrip()[:1]


def _before_data(head: bytes) -> int | None:
    """The number of characters before the list of objects that is the "data" of one object; None for other files.

    head: the beginning of the file, within which this list must begin. A row of turns may have a column of that name.
    """
    if b'"data"' not in head or _first_character(head) != b"{":
        return None
    text = head.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="ignore")
    if _has_texts(parse_line(text.lstrip().partition("\n")[0].encode())[0]):
        return None
    place = text.index("{") + 1
    while key := KEY.match(text, place):
        name = key[1]
        if name == '"data"':
            return key.end() if OBJECTS.match(text, key.end()) else None
        try:
            _, place = json.JSONDecoder().raw_decode(text, key.end())
        except (ValueError, RecursionError):
            return None
        if name.strip('"') in KEYS:
            return None
    return None


def _has_texts(value: Any) -> bool:
    """Whether a value is a row with turns or texts, or a part of one."""
    return isinstance(value, dict) and any(value.get(key) is not None for key in (*TURNS, *ANSWERS))


def _numbered(file: Path, elements: Iterator[Numbered]) -> tuple[str, Iterator[Numbered]]:
    """The origin text for an array's elements, and the elements, numbered by lines or by places."""
    first = list(islice(elements, 2))
    every = chain(first, elements)
    if len(first) == 2 and first[0][0] == first[1][0] and not first[1][-1]:
        return f"{file}: element ", ((place, *each[1:]) for place, each in enumerate(every, start=1))
    return f"{file}:", every


def _lines(opened: BinaryIO) -> Iterator[Numbered]:
    """The line number, value and mistake of every line that is not blank. A line too long ends the reading."""
    for number, line in lines_of(opened, LONGEST):
        if len(line) > LONGEST:
            yield number, None, TOO_LONG
            return
        stripped = line.removeprefix(codecs.BOM_UTF8).strip()
        if stripped:
            value, mistake = parse_line(stripped)
            yield number, value, f"{mistake}{CUT_LINE}" if mistake and not line.endswith(b"\n") else mistake


def _elements(opened: BinaryIO, before: int) -> Iterator[Numbered]:
    """The line, value and mistake of every array element. A broken element ends the reading.

    before: characters before the array, which is then a member of an object.
    """
    text = _ArrayText(opened)
    try:
        text.enter(before)
        while text.peek() not in ("]", ""):
            number = text.line
            value, mistake = text.element()
            yield number, value, mistake
            if mistake:
                return
        if not text.peek():
            yield text.line, None, 'broken JSON: the array has no end ("]")'
        elif before and not text.ends_object():
            yield text.line, None, BEHIND_DATA
    except UnicodeDecodeError:
        yield text.line, None, "not UTF-8 in the text that begins here"


class _ArrayText:
    """The text of an array after its "[", read piece by piece. line: of the next element, from 1."""

    def __init__(self, opened: BinaryIO) -> None:
        self.line = 1
        self._opened = opened
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._start, self._ended = "", 0, False

    def enter(self, before: int) -> None:
        """Skip the "[" that begins the array, white space, and as many characters before it."""
        self.peek()
        while len(self._text) < before and not self._ended:
            self._more(CHUNK)
        self._skip(max(self._start, before))
        self.peek()
        self._skip(self._start + 1)

    def ends_object(self) -> bool:
        """Whether nothing follows the array but the rest of the object around it."""
        self._skip(self._start + 1)
        while not self._ended and len(self._text) - self._start <= HEAD:
            self._more(CHUNK)
        rest, mistake = parse_line(('{"data": 0' + self._text[self._start :]).encode())
        return self._ended and not mistake and not _has_texts(rest)

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


STEM, CAPTIONS = "metadata", ("text", "caption")
OF_FILES = ("_file_name", "_file_names")  # the ends of other columns that name files
NO_CAPTION = (
    f'no "{CAPTIONS[0]}" or "{CAPTIONS[1]}" beside "{{}}": name the column of the captions, columns = {{{{ answer = '
    '"..." }}, or read only the images, with format = "image-folder"'
)


def is_metadata(file: Path) -> bool:
    return Path(plain_name(file)).stem.lower() == STEM


def captioned(row: dict[str, Any], question: str) -> tuple[dict[str, Any], str]:
    """The row in a form that `ingest` reads, and the mistake in it, "" for none. question: for rows with captions."""
    naming = next((name for name in FILE_NAMES if row.get(name) is not None), None)
    has_image = first_value(row, ("image", "images")) is not None
    if naming is None:
        other = next((key for key in row if key.endswith(OF_FILES) and row[key] is not None), None)
        if other is not None and not has_image:
            return row, f'which file is the image? columns = {{ image = "{other}" }} says so'
        return row, ""
    others = {key: value for key, value in row.items() if key != naming}
    if not has_image:
        others["image"] = row[naming]
    if not turns_mistake(others):
        return others, ""
    if not any(name in row for name in CAPTIONS):
        return row, NO_CAPTION.format(naming)
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


def mapped_records(records: Iterator[Record], columns: Columns, question: str) -> Iterator[Record]:
    """The records, their rows with the columns that `columns` names under its keys (ops/ingest/columns.py)."""
    is_first = is_mapped = True
    for record in records:
        if not record.mistake and isinstance(record.row, dict):
            is_mapped = applies(columns, record.row) if is_first else is_mapped
            if is_mapped:
                row, mistake = mapped(record.row, columns, question, is_first=is_first)
                record = attrs.evolve(record, row=row, mistake=mistake)
            is_first = False
        yield record


DELIMITERS = {".csv": ",", ".tsv": "\t"}
OTHERS = (",", ";", "\t")
MOST_COLUMNS = 1000


def csv_records(file: Path, columns: Columns | None = None) -> Iterator[Record]:
    """The rows of a CSV file; blank lines are skipped. A row has the number of the line where it begins.

    columns: as in the config, which decide with the delimiter what the first line names. A broken row ends the reading,
    since the next one cannot be found. Raises DataError as `open_data`.
    """
    delimiter, number, names, mistake = _header(file, columns)
    if mistake:
        yield Record(number, f"{file}:", None, mistake, file.parent, 1.0)
        return
    with open_data(file) as data:
        rows = _Rows(data, delimiter)
        next(rows, None)
        for number, fields, mistake in rows:
            if not mistake and len(fields) != len(names):
                mistake = f"{len(fields)} fields, and the first line names {len(names)} columns; quote texts with "
                mistake += "delimiters or line breaks"
            row = {name: field or None for name, field in zip(names, fields, strict=False) if name}
            yield Record(number, f"{file}:", row, mistake, file.parent, data.share)


def csv_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The sound rows of a CSV file, whatever its columns are. Raises DataError as `open_data`."""
    delimiter, _, names, _ = _header(file, None)
    with open_data(file) as data:
        rows = _Rows(data, delimiter)
        next(rows, None)
        for _, fields, mistake in rows:
            if not mistake and len(fields) == len(names):
                yield {name: field or None for name, field in zip(names, fields, strict=True) if name}


def names_rows(file: Path, columns: Columns | None = None) -> bool:
    """Whether a CSV file has the columns of rows that ingest reads; other CSV files may lie beside images."""
    try:
        _, _, names, mistake = _header(file, columns)
    except DataError:
        return False
    if is_metadata(file) and any(name in names for name in FILE_NAMES):
        return True  # a mistake in it is reported, since captions would be lost
    return bool(names) and not mistake


def _header(file: Path, columns: Columns | None) -> tuple[str, int, list[str], str]:
    """The delimiter of a CSV file, and of its first line the number, the names of the columns, and the mistake in them.

    The delimiter is that of the suffix, or the first other one with which the line names columns of rows; without any
    the one that gives most columns.
    """
    own = DELIMITERS.get(data_suffix(file), ",")
    found = []
    for delimiter in dict.fromkeys((own, *OTHERS)):
        with open_data(file) as data:
            number, names, mistake = next(_Rows(data, delimiter), (1, [], ""))
        found.append((delimiter, number, names, mistake or (_header_mistake(file, names, columns) if names else "")))
        if not found[-1][-1]:
            return found[-1]
    return max(found, key=lambda each: len(each[2]))


class _Rows(Iterator[tuple[int, list[str], str]]):
    """An iterator over rows that are not blank, as line number, fields and mistake."""

    def __init__(self, data: Data, delimiter: str) -> None:
        self._read = 0
        self._begin = 0  # bytes before the row
        self._is_broken = False
        csv.field_size_limit(LONGEST)
        self._reader = csv.reader(self._lines(data), delimiter=delimiter, strict=True)

    def __next__(self) -> tuple[int, list[str], str]:
        if self._is_broken:
            raise StopIteration
        fields: list[str] = []
        while not fields:
            number, self._begin = self._reader.line_num + 1, self._read
            try:
                fields = next(self._reader)
            except (csv.Error, ValueError) as error:
                self._is_broken = True
                return number, [], _why(error)
        return number, fields, ""

    def _lines(self, data: Data) -> Iterator[str]:
        """The decoded lines of the file. Raises ValueError in a row that is too long, and for text that is
        not UTF-8.
        """
        for number, line in lines_of(data.file, LONGEST):
            self._read += len(line)
            if self._read - self._begin > LONGEST:
                raise ValueError(TOO_LONG)
            yield (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode("utf-8")


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start + 1} of a line of the row that begins here"
    if isinstance(error, csv.Error):
        return f"broken CSV in the row that begins here: {error}"
    return str(error)


def _header_mistake(file: Path, names: list[str], columns: Columns | None) -> str:
    if len(names) > MOST_COLUMNS:
        return f"{len(names)} columns, more than {MOST_COLUMNS}"
    named = [name for name in names if name]
    again = next((name for place, name in enumerate(named) if name in named[:place]), None)
    if again is not None:
        return f'two columns are named "{shortened(again)}"'
    example: dict[str, Any] = {name: "[]" if name in TURNS else "text" for name in named}
    if columns is not None and applies(columns, example):
        example, mistake = mapped(example, columns, "text", is_first=True)
        if mistake:
            return mistake
        example |= {key: "[]" for key in TURNS if key in example}
    if is_metadata(file):
        example, mistake = captioned(example, "text")
        if mistake:
            return mistake
    if form_of(example) is None and (mistake := turns_mistake(example)):
        return f"{mistake}; the first line must name the columns, and it is {shortened(', '.join(named))}"
    return ""
