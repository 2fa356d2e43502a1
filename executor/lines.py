"""Plain output of the commands."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Container, Sequence
from pathlib import Path

GAP = "  "
NARROWEST = 16  # what the last column keeps on a small terminal


def print_lines(text: str, *, error: bool = False) -> None:
    """Where nobody reads on, as behind `| head`, the rest is said to nobody."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        with Path(os.devnull).open("wb") as nobody:
            os.dup2(nobody.fileno(), stream.fileno())


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], right: Container[str] = ()) -> str:
    """A table; columns named in `right` are aligned there. On a terminal the last column is folded to its width."""
    table = [tuple(header), *map(tuple, rows)]
    widths = [max(len(row[place]) for row in table) for place in range(len(header))]
    margin = sum(widths[:-1]) + len(GAP) * (len(header) - 1)
    room = max(shutil.get_terminal_size().columns - margin, NARROWEST) if sys.stdout.isatty() else 0
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
