"""Records of JSON files: one object a line, or one array of objects, read as a stream.

The number of a record, which is the id of a row without one, is its line. In an array whose first two elements share a
line, as `json.dump` writes it, it is the place of the element.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from attrs import frozen

from dsl.errors import DataError
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
    folder  of relative image paths
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
    """The origin of an array's elements, and the elements by their lines or by their places."""
    first = list(islice(elements, 2))
    every = chain(first, elements)
    if len(first) == 2 and first[0][0] == first[1][0] and not first[1][-1]:
        return f"{file}: element ", ((place, *each[1:]) for place, each in enumerate(every, start=1))
    return f"{file}:", every


def _lines(file: Path) -> Iterator[Numbered]:
    """(line, bytes read, value, mistake) of every line that is not blank; one that is too long ends the reading."""
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
    """(line, bytes read, value, mistake) of every element of the array; a broken element ends the reading."""
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
        """Skip the "[", the first character except white space."""
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
        """The next element, or the mistake in it; the text is doubled until the element ends."""
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
