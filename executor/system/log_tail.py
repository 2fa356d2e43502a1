"""The end of a stage's log as shown to the user, of bounded size."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from dsl.os_errors import clear_errors
from executor.system.output import one_line

LINES = 20
LENGTH = 500  # characters of a line
TAIL_BYTES = 65536


def last_lines(log: Path, start: int) -> tuple[str, ...]:
    """The last lines of a log from byte `start` on, without empty ones at the end."""
    with clear_errors(log), log.open("rb") as file:
        first = max(start, file.seek(0, 2) - TAIL_BYTES)
        file.seek(first)
        data = file.read(TAIL_BYTES).rstrip()
    lines = deque(data.split(b"\n"), maxlen=LINES)
    is_cut = first > start and data.count(b"\n") < LINES
    shown = [_shown(line) for line in lines if lines != deque([b""])]
    return tuple([f"... {shown[0]}", *shown[1:]] if is_cut and shown else shown)


def _shown(line: bytes) -> str:
    return one_line(line[: 4 * LENGTH].decode(errors="replace").rstrip(), LENGTH)
