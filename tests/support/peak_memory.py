"""How much memory a piece of code needs at most, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys

PEAK = """
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


def peak_memory(code: str, *arguments: object) -> tuple[list[str], int]:
    """Run code in a process; returns the lines that it prints, and its peak memory in MiB.

    arguments: the code's sys.argv[1:].
    """
    command = [sys.executable, "-c", code + PEAK, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    *lines, peak = done.stdout.splitlines()
    return lines, int(peak) >> 10
