"""TOML as pipeline files are written in it: the values of a text, and where each of its keys stands."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any

import tomli

from dsl.errors import PipelineError, shortened
from dsl.finding import Field, Finding, Position

KeyPath = tuple[str | int, ...]

MOST_NESTED = 50
INTS = range(-(2**63), 2**63)
WORDS = {"true": "true", "false": "false", "yes": "true", "no": "false", "on": "true", "off": "false"}
HINTS = {
    "Unescaped '\\' in a string": "write \\\\ for it, or put the string in single quotes",
    "Illegal character '\\n'": "the text has no closing quote",
    "Cannot overwrite a value": "the key already has a value",
}

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


def parsed(text: str, file: str) -> dict[str, Any]:
    """Parse a TOML text. Raises PipelineError at the first syntax error, or with all values that are refused."""
    try:
        values = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        message, hint = _explained(error)
        place = Position(file, error.lineno, error.colno)
        raise PipelineError([Finding(f"not TOML: {message}", Field(position=place), hint)]) from error
    except (ValueError, RecursionError) as error:  # such as a number with thousands of digits, which has no place
        raise PipelineError([Finding(f"not TOML: {error}", Field(position=Position(file, 1, 1)))]) from error
    wrong = list(refused_values(values))
    if wrong:
        places = key_positions(text, file)
        raise PipelineError([_refused(path, message, places, file) for path, message in wrong])
    return values


def refused_values(values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """The values that dflow refuses, with reasons: integers beyond 64 bits, and tables nested beyond MOST_NESTED."""
    waiting: list[tuple[Any, KeyPath]] = [(values, ())]
    while waiting:
        value, path = waiting.pop()
        if len(path) > MOST_NESTED:
            yield path, f"tables or lists are nested more than {MOST_NESTED} deep"
            return
        members = value.items() if isinstance(value, dict) else enumerate(value)
        for key, member in members:
            if isinstance(member, (dict, list)):
                waiting.append((member, (*path, key)))
            elif isinstance(member, int) and member not in INTS:
                yield (*path, key), "the integer does not fit in 64 bits"


def _refused(path: KeyPath, message: str, places: Mapping[KeyPath, Position], file: str) -> Finding:
    """A mistake, at the nearest key around a path whose place is known."""
    shown = path[:MOST_NESTED]
    here = next((places[path[:end]] for end in range(len(path), 0, -1) if path[:end] in places), Position(file, 1, 1))
    return Finding(message, Field(".".join(map(str, shown if len(shown) < 5 else [*shown[:4], "..."])), here))


def _explained(error: tomli.TOMLDecodeError) -> tuple[str, str]:
    """A message for a TOML syntax error, and a hint for common mistakes."""
    if error.msg != "Invalid value":
        return error.msg, HINTS.get(error.msg, "")
    before = error.doc[: error.pos].rpartition("\n")[2]
    found = re.match(r"[^\s,\]}#]+", error.doc[error.pos :])
    if found is None or "=" not in before:
        return "expected a value", "" if "=" in before else "a list or table above is not closed"
    word = found[0]
    hint = f'text needs quotes: "{shortened(word)}"' if word[0].isalpha() else ""
    if word.lower() in WORDS:
        hint = f"a bool is written {WORDS[word.lower()]}"
    elif word.lower() in ("none", "null", "nil"):
        hint = "leave the key out for none"
    return f"expected a value, got {shortened(word)}", hint


def key_positions(text: str, file: str) -> dict[KeyPath, Position]:
    """The place where each key is first written, by its path; list indices in the path are ints."""
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
        """Read the parts of a dotted key and the blanks after it."""
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
        """Move past the match of a pattern at this position, and return the matched text."""
        found = pattern.match(self.text, self.at)
        assert found is not None, f"tomli read what this scanner cannot, at {self.position()}"
        self.at = found.end()
        return found[0]

    def position(self) -> Position:
        line = bisect_right(self.line_starts, self.at)
        return Position(self.file, line, self.at - self.line_starts[line - 1] + 1)
