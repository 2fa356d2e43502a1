"""Plain output of the commands."""

from __future__ import annotations

import sys


def print_lines(text: str, *, error: bool = False) -> None:
    print(text, file=sys.stderr if error else sys.stdout, flush=True)
