"""What the nodes of every tool do: a line more than the node before, or a large file, which can wait halfway.

Every call writes its name to calls.txt beside this file, and a held one its process to beats.txt repeatedly.
As a program: `work.py append NAME OUT VALUE SECONDS [BEFORE]`, `work.py large OUT INPUT MEGABYTES`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from helper import joined

HERE = Path(__file__).resolve().parent
BEAT_S = 0.05
HELD_S = 180.0


def append(name: str, out: Path, value: str, before: Path | None, seconds: float = 0.0) -> None:
    _note("calls.txt", name)
    time.sleep(seconds)
    out.write_text(joined(before.read_text() if before is not None else "", value))


def large(out: Path, text: str, megabytes: int) -> None:
    """Repeats `text`. While a file `hold` is beside this file, it waits halfway."""
    _note("calls.txt", "large")
    block = (text * (1 << 20))[: 1 << 20].encode()
    with out.open("wb") as file:
        for written in range(megabytes):
            if 2 * written >= megabytes:
                file.flush()
                _hold()
            file.write(block)


def _hold() -> None:
    end = time.monotonic() + HELD_S
    while (HERE / "hold").exists() and time.monotonic() < end:
        _note("beats.txt", str(os.getpid()))
        time.sleep(BEAT_S)


def _note(file: str, line: str) -> None:
    with (HERE / file).open("a") as opened:
        opened.write(f"{line}\n")


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "append":
        append(rest[0], Path(rest[1]), rest[2], Path(rest[4]) if rest[4:] else None, float(rest[3]))
    else:
        large(Path(rest[0]), Path(rest[1]).read_text(), int(rest[2]))
