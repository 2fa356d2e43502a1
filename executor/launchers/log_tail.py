"""What a user is shown of a stage's log while it runs and when it fails: bounded, whatever the stage printed."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from executor.system.os_errors import clear_errors
from executor.system.output import printable

LINES = 20
LENGTH = 500  # characters of a line
TAIL_BYTES = 65536
BLOCK_BYTES = 1 << 20
NOTE = b"dflow: "
NOTE_LENGTH = 2000


def last_lines(log: Path, start: int) -> tuple[str, ...]:
    """The last lines that were written from the byte `start` on, empty ones at their end left out."""
    with clear_errors(log), log.open("rb") as file:
        first = max(start, file.seek(0, 2) - TAIL_BYTES)
        file.seek(first)
        data = file.read(TAIL_BYTES).rstrip()
    lines = deque(data.split(b"\n"), maxlen=LINES)
    is_cut = first > start and data.count(b"\n") < LINES
    shown = [shown_line(line) for line in lines if lines != deque([b""])]
    return tuple([f"... {shown[0]}", *shown[1:]] if is_cut and shown else shown)


def shown_line(line: bytes, length: int = LENGTH) -> str:
    """A line as a terminal may be given it: no control characters, and not longer than a few lines there."""
    text = printable(line[: 4 * length].decode(errors="replace").rstrip())
    return text if len(text) <= length and len(line) <= 4 * length else f"{text[:length]} ..."


class Notes:
    """Lines of a growing log that begin with "dflow: ", from a byte on; never more than a block is held."""

    def __init__(self, log: Path, start: int) -> None:
        self._log = log
        self._offset = start
        self._is_inside = False  # of a line whose beginning was read before

    def read(self) -> list[str]:
        """Those since the last call, without that beginning. A last line without its end is left for later."""
        notes: list[str] = []
        with clear_errors(self._log), self._log.open("rb") as file:
            file.seek(self._offset)
            while block := file.read(BLOCK_BYTES):
                end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
                whole = block[:end] if end else block
                if not end and len(block) < BLOCK_BYTES:
                    break
                lines = whole.replace(b"\r", b"\n").split(b"\n")
                notes += map(_note, filter(_is_note, lines[1:] if self._is_inside else lines))
                self._is_inside = not end
                self._offset += len(whole)
                file.seek(self._offset)
        return notes


def _is_note(line: bytes) -> bool:
    return line.startswith(NOTE)


def _note(line: bytes) -> str:
    return shown_line(line.removeprefix(NOTE), NOTE_LENGTH)
