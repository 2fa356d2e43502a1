"""Plain output of the commands, and their exit codes."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shlex
import sys
import time
from collections import deque
from collections.abc import Container, Sequence
from pathlib import Path
from typing import IO, Any, AnyStr, TextIO

from dsl.files import clear_errors

OK, FAILED, USAGE = 0, 1, 2  # USAGE: a mistake in usage or in a pipeline, an unknown name
INTERRUPTED = 130  # Ctrl-C while nothing ran
UNCHANGED_S = 300.0  # until an unchanged progress line is repeated
GAP = "  "
NARROWEST = 16  # minimum width of the last column on a small terminal
# The reader is gone, as behind `| head` or in a closed terminal: not worth reporting.
READER_GONE = frozenset({errno.EPIPE, errno.EIO})
NAMES = {1: "standard output", 2: "standard error"}
# Those that could not be written for another reason, with the operating system's message.
OUTPUT_ERRORS: dict[int, str] = {}
# Control characters, those that turn the direction of a text, and lone surrogates, except for tabs and line ends.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
ENDS_OF_LINES = re.compile("[\n\u2028\u2029]")  # those that CONTROL leaves
# The commands that work on a store.
ON_A_STORE = (
    *("accept", "diagnose", "diff", "doctor", "evaluate", "gc", "init", "logs", "plan", "pull", "push", "report"),
    *("resume", "rm", "run", "runs", "serve", "status", "sync", "tune", "ui"),
)
COMMAND = re.compile(
    rf"\bdflow ({'|'.join(sorted(ON_A_STORE, reverse=True))})(?![\w-])"
    r"(?! (?:sets|starts|asks|refuses?|and|one) )"  # a sentence about the command
    r"(?![^`;,\n]*--store)"
)
STORE_OPTION: list[str] = []  # --store DIR, where commands would not find the store without it


def print_lines(text: str, *, error: bool = False) -> None:
    """Print text; if the reader is gone, the rest is dropped."""
    stream = sys.stderr if error else sys.stdout
    write_on(stream, f"{as_typed(printable(text))}\n")


def print_json(value: Any, *, ascii_only: bool = True) -> None:
    """Print a value as strict JSON, with null for numbers that are not finite."""
    text = json.dumps(finite(value), indent=1, ensure_ascii=ascii_only, allow_nan=False)
    write_on(sys.stdout, CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")


def finite(value: Any) -> Any:
    """The value with None for each number in it that is not finite."""
    if isinstance(value, dict):
        return {name: finite(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str) -> str:
    """The text with control characters escaped as in Python, such as `\\x1b`."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def name_store(path: Path, default: Path) -> None:
    """Set the store that printed commands name from now on; none if they would use `path` by default."""
    here = Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    STORE_OPTION[:] = [] if path == default else [f"--store {shlex.quote(str(shown))}"]


def as_typed(text: str) -> str:
    """The text with dflow's commands as the user has to type them, with --store where necessary."""
    return COMMAND.sub(lambda found: " ".join([found[0], *STORE_OPTION]), text) if STORE_OPTION else text


def one_line(text: str, length: int) -> str:
    """The text as one line of at most `length` characters, with control characters and line ends escaped."""
    shown = ENDS_OF_LINES.sub(lambda found: ascii(found[0])[1:-1], printable(text))
    return shown if len(shown) <= length else f"{shown[:length]} ..."


def indented(text: str) -> str:
    """The text with every further line indented, so that none of them looks like a line of dflow itself."""
    first, *others = text.splitlines() or [""]
    return "\n".join([first, *(line if line[:1].isspace() else f"    {line}" for line in others)])


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 artifact`, `4 artifacts`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def moment(at: float) -> str:
    """A time in seconds since 1970, as text with date and time of day."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def shown_duration(seconds: float) -> str:
    """A duration as text: `0.4 s`, `3 min 12 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def shown_digest(digest: str | None) -> str:
    """The first characters of a digest or key, for tables and messages; empty for None."""
    return digest[:12] if digest else ""


def write_on(stream: IO[AnyStr], text: AnyStr) -> None:
    """Write text and flush; after the first error, all further output to the stream is discarded."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        number = stream.fileno()
        _discard(number)
        if error.errno not in READER_GONE and number in NAMES:
            OUTPUT_ERRORS[number] = error.strerror or str(error)


class Enduring:
    """A stream for libraries that write to it themselves; it ignores a closed terminal instead of failing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        write_on(self._stream, text)
        return len(text)

    def flush(self) -> None:
        write_on(self._stream, "")

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def prepare_streams() -> None:
    """Prepare the standard streams: they accept any text, and closed descriptors lead to the null device.

    Otherwise the next opened file would get a closed descriptor's number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _discard(number)
            if number in NAMES:
                OUTPUT_ERRORS[number] = "it is closed"
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def output_errors_text() -> str:
    """A text that names each output stream that could not be written although its reader exists; "" for none."""
    return "; ".join(f"{NAMES[number]} cannot be written: {why}" for number, why in OUTPUT_ERRORS.items())


def _discard(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], right: Container[str] = ()) -> str:
    """A text table. right: names of columns aligned right. On a terminal the last column is folded to fit."""
    table = [tuple(header), *map(tuple, rows)]
    widths = [max(len(row[place]) for row in table) for place in range(len(header))]
    margin = sum(widths[:-1]) + len(GAP) * (len(header) - 1)
    room = 0
    if sys.stdout.isatty():
        import shutil
        import textwrap

        room = max(shutil.get_terminal_size().columns - margin, NARROWEST)
    lines = []
    for row in table:
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, header, strict=True)
        ]
        last = textwrap.wrap(row[-1], room) if room and len(row[-1]) > room else [cells[-1]]
        lines.append(GAP.join([*cells[:-1], last[0]]).rstrip())
        lines += [" " * margin + more for more in last[1:]]
    return "\n".join(lines)


class Unrepeated:
    """A filter for the progress lines of one task in logs and pipes: equal lines are rarely repeated."""

    def __init__(self) -> None:
        self._last = ""
        self._changed_at = ""
        self._shown_at = 0.0

    def line(self, text: str) -> str:
        """The text to print: itself where it changed, else every five minutes, with the time of its change, else ""."""
        now = time.monotonic()
        is_same = text == self._last
        if is_same and now - self._shown_at < UNCHANGED_S:
            return ""
        if not is_same:
            self._changed_at = time.strftime("%H:%M:%S")
        self._last, self._shown_at = text, now
        return f"{text} (unchanged since {self._changed_at})" if is_same else text


TAIL_LINES = 20
TAIL_LENGTH = 500  # characters of a line
TAIL_BYTES = 65536


def last_lines(log: Path, start: int) -> tuple[str, ...]:
    """The last lines of a log from byte `start` on, without empty ones at the end."""
    with clear_errors(log), log.open("rb") as file:
        first = max(start, file.seek(0, 2) - TAIL_BYTES)
        file.seek(first)
        data = file.read(TAIL_BYTES).rstrip()
    lines = deque(data.split(b"\n"), maxlen=TAIL_LINES)
    is_cut = first > start and data.count(b"\n") < TAIL_LINES
    shown = [_shown(line) for line in lines if lines != deque([b""])]
    return tuple([f"... {shown[0]}", *shown[1:]] if is_cut and shown else shown)


def _shown(line: bytes) -> str:
    return one_line(line[: 4 * TAIL_LENGTH].decode(errors="replace").rstrip(), TAIL_LENGTH)
