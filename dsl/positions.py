"""Where every key of a TOML document stands: a scanner beside tomli, which gives values and no places.

It reads documents that tomli has accepted, so it only has to find keys, never to refuse anything.
"""

from __future__ import annotations

import re
from bisect import bisect_right

import tomli

from dsl.errors import Position

KeyPath = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_BASIC_STRING = r'"(?:[^"\\\n]|\\.)*"'
_LITERAL_STRING = r"'[^'\n]*'"
_KEY = re.compile(rf"[A-Za-z0-9_-]+|{_BASIC_STRING}|{_LITERAL_STRING}")
_SCALAR = re.compile(
    r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{3,5}'
    r"|'''(?:[^']|'{1,2}(?!'))*'{3,5}"
    rf"|{_BASIC_STRING}|{_LITERAL_STRING}"
    r"|[^,\]}#\n]+",
    re.DOTALL,
)


def key_positions(text: str, file: str) -> dict[KeyPath, Position]:
    """Path of every key, with list indices as ints, -> the place where it is first written."""
    scanner = _Scanner(text.replace("\r\n", "\n"), file)
    scanner.read_document()
    return scanner.positions


class _Scanner:
    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        self.at = 0
        self.positions: dict[KeyPath, Position] = {}
        self.last_index: dict[KeyPath, int] = {}  # array of tables -> index of its newest element
        self.line_starts = [0, *(found.end() for found in re.finditer("\n", text))]

    def read_document(self) -> None:
        table: KeyPath = ()
        self.skip(_BLANK)
        while self.at < len(self.text):
            if self.text.startswith("[", self.at):
                table = self.read_header()
            else:
                self.read_pair(table)
            self.skip(_BLANK)

    def read_header(self) -> KeyPath:
        is_array = self.text.startswith("[[", self.at)
        self.at += 2 if is_array else 1
        path: KeyPath = ()
        keys = self.read_dotted_key()
        self.at += 2 if is_array else 1
        for place, (key, position) in enumerate(keys):
            path = (*path, key)
            self.positions.setdefault(path, position)
            if is_array and place == len(keys) - 1:
                self.last_index[path] = self.last_index.get(path, -1) + 1
            if path in self.last_index:
                path = (*path, self.last_index[path])
        return path

    def read_pair(self, table: KeyPath) -> None:
        path = table
        for key, position in self.read_dotted_key():
            path = (*path, key)
            self.positions.setdefault(path, position)
        self.at += 1  # the equals sign
        self.read_value(path)

    def read_dotted_key(self) -> list[tuple[str, Position]]:
        """The parts of a key; ends behind the blanks that follow it."""
        keys = []
        while True:
            self.skip(_BLANK)
            position = self.position()
            raw = self.skip(_KEY)
            key = tomli.loads(f"key = {raw}")["key"] if raw[0] in "\"'" else raw
            keys.append((key, position))
            self.skip(_BLANK)
            if not self.text.startswith(".", self.at):
                return keys
            self.at += 1

    def read_value(self, path: KeyPath) -> None:
        self.skip(_BLANK)
        opening = self.text[self.at]
        if opening not in "[{":
            self.skip(_SCALAR)
            return
        closing = "]" if opening == "[" else "}"
        self.at += 1
        self.skip(_BLANK)
        index = 0
        while self.text[self.at] != closing:
            if opening == "[":
                self.read_value((*path, index))
            else:
                self.read_pair(path)
            index += 1
            self.skip(_BLANK)
            if self.text[self.at] == ",":
                self.at += 1
                self.skip(_BLANK)
        self.at += 1

    def skip(self, pattern: re.Pattern[str]) -> str:
        """Move behind what the pattern finds here, and return it."""
        found = pattern.match(self.text, self.at)
        assert found is not None, f"tomli read what this scanner cannot, at {self.position()}"
        self.at = found.end()
        return found[0]

    def position(self) -> Position:
        line = bisect_right(self.line_starts, self.at)
        return Position(self.file, line, self.at - self.line_starts[line - 1] + 1)
