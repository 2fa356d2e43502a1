"""TOML as pipeline files are written in it: the values of a text, or all places where it is no TOML.

tomli stops at the first mistake. What it then refuses is parsed table by table, each of them alone, and key by key
within the ones that are refused, so that a mistake in every table is told at once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tomli
from attrs import frozen

from dsl.errors import Mistake, PipelineError, Position, shortened
from dsl.positions import KeyPath, key_positions

MOST_NESTED = 50
NO_CHARACTER = "\x0b"  # as wrong as a carriage return, which tomli would take with the line end that now follows it
MOST_TOLD = 100
MOST_JOINED = 3  # tables in a list or text of several lines that look like headers
INTS = range(-(2**63), 2**63)

# Compiled where a file is wrong, not whenever dflow starts.
_KEY = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_KEYS = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_HEADER = rf"\s*\[\[?\s*{_KEYS}\s*\]\]?\s*(?:#.*)?"
_LIKE_HEADER = r"\s*\[\[?\s*[A-Za-z]"
_NEW_STATEMENT = rf"\s*(?:$|#|\[|{_KEYS}\s*=)"
_TWICE = r"Cannot declare (\(.*\)) twice"
_UNCLOSED = {
    "Unclosed array": "the list has no closing ]",
    "Unclosed inline table": "the table has no closing }",
    "Unterminated string": "the text has no closing quotes",
    'Expected "\'"': "the text has no closing quote",
    "Illegal character '\\n'": "the text has no closing quote",
}
_BARE_WORD = r"[^\W\d][\w./@:$ -]*"
_WORDS = {"true": "true", "false": "false", "yes": "true", "no": "false", "on": "true", "off": "false"}


def parsed(text: str, file: str) -> dict[str, Any]:
    """The values of a text. Raises PipelineError with all mistakes: what is no TOML, and what no pipeline can hold."""
    try:
        values = tomli.loads(text)
    except (ValueError, RecursionError) as error:
        raise PipelineError(_Broken(text, file).mistakes()) from error
    wrong = list(refused_values(values))
    if wrong:
        places = key_positions(text, file)
        raise PipelineError([_refused(path, message, places, file) for path, message in wrong])
    return values


def refused_values(values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Ints of more than 64 bits, which TOML does not promise to keep, and tables in tables beyond all sense."""
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
                yield (*path, key), "an int has 64 bits, and this one needs more"


def _refused(path: KeyPath, message: str, places: Mapping[KeyPath, Position], file: str) -> Mistake:
    """At the nearest key."""
    shown = path[:MOST_NESTED]
    here = next((places[path[:end]] for end in range(len(path), 0, -1) if path[:end] in places), Position(file, 1, 1))
    return Mistake(message, ".".join(map(str, shown if len(shown) < 5 else [*shown[:4], "..."])), here)


@frozen
class _Fault:
    """Where tomli stopped; line counts from 0, column is 0 where it told no place."""

    line: int
    column: int
    message: str


class _Broken:
    """A text that tomli refuses. Lines whose mistake is told are taken out."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.written = text.replace("\r\n", "\n").split("\n")
        self.lines = list(self.written)
        starts = [0, *(k for k, line in enumerate(self.lines) if k and self._is_header(line))]
        self.blocks = list(zip(starts, [*starts[1:], len(self.lines)], strict=True))

    def mistakes(self) -> list[Mistake]:
        found: list[Mistake] = []
        closed = 0  # where a block ends that holds what only looks like headers
        for place, (start, end) in enumerate(self.blocks):
            if start < closed or len(found) >= MOST_TOLD or self._fault(start, end) is None:
                continue
            ends = [each for _, each in self.blocks[place + 1 : place + 1 + MOST_JOINED]]
            closed = next((each for each in ends if self._fault(start, each) is None), 0)
            if not closed:
                found += self._in_block(start, end)
        while len(found) < MOST_TOLD and (fault := self._fault(0, len(self.lines))) is not None:
            start, end = next(block for block in reversed(self.blocks) if block[0] <= fault.line)
            found.append(self._mistake(0, fault))
            self._take_out(start, end)
        return sorted(found, key=lambda mistake: (mistake.position.line, mistake.position.column))  # type: ignore[union-attr]

    @staticmethod
    def _is_header(line: str) -> bool:
        return re.fullmatch(_HEADER, line) is not None or (re.match(_LIKE_HEADER, line) is not None and "," not in line)

    def _fault(self, start: int, end: int) -> _Fault | None:
        """The first one of these lines alone."""
        try:
            tomli.loads("\n".join(self.lines[start:end]).replace("\r", NO_CHARACTER))
        except tomli.TOMLDecodeError as error:
            return _Fault(min(start + error.lineno, end) - 1, error.colno, error.msg)
        except (ValueError, RecursionError) as error:  # a number with thousands of digits, say, which has no place
            return _Fault(end - 1, 0, str(error))
        return None

    def _in_block(self, start: int, end: int) -> list[Mistake]:
        """Every line that is wrong by itself, up to one that leaves open where the next statement begins."""
        found: list[Mistake] = []
        has_header = True
        while len(found) < MOST_TOLD and (fault := self._fault(start, end)) is not None:
            first = self._statement(start, fault)
            found.append(self._mistake(start, fault))
            is_open = first + 1 < end and not re.match(_NEW_STATEMENT, self.lines[first + 1])
            if first != fault.line or is_open:
                self._take_out(start, end)
                return found
            has_header = has_header and not (first == start and self._is_header(self.lines[start]))
            self._take_out(first, first + 1)
        if not has_header:
            self._take_out(start, end)
        return found

    def _statement(self, start: int, fault: _Fault) -> int:
        """The line in which the statement begins that tomli could not read to its end."""
        ends = range(fault.line, start, -1)
        return next((end for end in ends if self._fault(start, end) is None), start)

    def _take_out(self, start: int, end: int) -> None:
        self.lines[start:end] = [""] * (end - start)

    def _mistake(self, start: int, fault: _Fault) -> Mistake:
        first = self._statement(start, fault)
        line, column = fault.line, fault.column
        rest = self.lines[line][max(column - 1, 0) :]
        message, hint = fault.message, ""
        is_twice = message.startswith(("Cannot", "Duplicate"))
        if message in _UNCLOSED or first != line or column == 0 or is_twice:
            line, column = first, len(self.lines[first]) - len(self.lines[first].lstrip(" \t[")) + 1
        if is_twice:
            message, hint = self._given_twice(message, first)
        elif rest.startswith("\r"):
            message, hint = "a carriage return alone ends no line", "save the file with usual line ends"
        elif message in _UNCLOSED:
            message = _UNCLOSED[message]
        elif message == "Invalid value":
            value = self.lines[first].partition("=")[2].strip()
            message, hint = _no_value(rest, value)
        elif "integer string conversion" in message:
            message = "a number has thousands of digits"
        elif message.startswith("Expected newline"):
            message, hint = _too_much(rest)
        elif message.startswith("Unescaped"):
            hint = "write \\\\ for it, or put the text into single quotes"
        column = min(max(column, 1), len(self.lines[line]) + 1)
        return Mistake(f"not TOML: {message}", "", Position(self.file, line + 1, column), hint)

    def _given_twice(self, message: str, line: int) -> tuple[str, str]:
        """What is declared, and where it stands already."""
        twice = re.fullmatch(_TWICE, message)
        if twice is None:
            key = re.split("[=#]", self.lines[line], maxsplit=1)[0].strip()
            return f"{shortened(key)} has a value already", "give it once, and all that belongs to it in one place"
        path: KeyPath = ast.literal_eval(twice[1])
        shown = shortened(".".join(map(str, path)))
        before = key_positions("\n".join(self.lines[:line]), self.file).get(path)
        where = f"the first time in line {before.line}" if before is not None else ""
        return f"the table [{shown}] is declared twice", where


def _no_value(rest: str, value: str) -> tuple[str, str]:
    """What stands where tomli expected a value, and how it may have been meant. value: the first line of the whole."""
    word = re.split(r"[,\]}#]", rest, maxsplit=1)[0].strip()
    if not rest.strip() and value.startswith(("[", "{")):
        return _UNCLOSED["Unclosed array" if value.startswith("[") else "Unclosed inline table"], ""
    if not word:
        return "there is no value behind the =" if not value else "expected a value", ""
    hint = ""
    if word.lower() in _WORDS:
        hint = f"a bool is written {_WORDS[word.lower()]}"
    elif word.lower() in ("none", "null", "nil"):
        hint = "for none leave the key out"
    elif re.fullmatch(_BARE_WORD, word):
        hint = f'a text stands in quotes: "{shortened(word)}"'
    return f"expected a value, got {shortened(word)}", hint


def _too_much(rest: str) -> tuple[str, str]:
    hint = "every key = value stands on a line of its own"
    return f"expected the end of the line, got {shortened(rest.strip()) or 'something that is not shown'}", hint
