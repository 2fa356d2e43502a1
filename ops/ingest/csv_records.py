"""Records of CSV files: the first line names the columns, and each row is an object of texts.

An empty field is null; columns without a name, such as the index that pandas writes, are left out.
"""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsl.errors import DataError, shortened
from ops.ingest.captions import FILE_NAME, captioned, is_metadata
from ops.ingest.records import LONGEST, TOO_LONG, Record
from ops.ingest.row_form import turns_mistake
from ops.lib.data.json_lines import bounded_lines

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
    """Whether the columns are those of rows that ingest reads: other CSV files lie beside images."""
    try:
        _, columns, mistake = next(_Rows(file), (0, [], "empty"))
    except OSError:
        return False
    if is_metadata(file) and FILE_NAME in columns:
        return True  # a mistake in it is reported, since captions would be lost
    return not (mistake or _header_mistake(file, columns))


class _Rows(Iterator[tuple[int, list[str], str]]):
    """(Line, fields, mistake) of every row that is not blank. read: bytes so far."""

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
        """Raises ValueError in a row that is too long, and for text that is not UTF-8."""
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
    if mistake := turns_mistake(example):
        return f"{mistake}; the first line must name the columns, and it is {shortened(', '.join(named))}"
    return ""
