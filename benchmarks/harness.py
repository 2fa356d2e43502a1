"""Shared by the benchmarks: rounds of sides, ratios, tables, command lines, processes of a side.

A round runs every side once, and the next round starts with the next side, so that other load of the machine affects
all sides equally. A ratio of two sides is the median of the rounds' ratios, not the ratio of medians. Imports no
torch: the parent of measured processes stays small.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

Name = TypeVar("Name")
Outcome = TypeVar("Outcome")

ROOT = Path(__file__).parent.parent
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
ALLOCATORS = ("LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def in_rounds(
    sides: Mapping[Name, Callable[[], Outcome]],
    rounds: int,
    shown: Callable[[Outcome], str] | None = None,
    title: str = "",
) -> dict[Name, list[Outcome]]:
    """Run every side once per round; returns the outcomes of each side, one per round.

    shown: the text to print for an outcome as soon as it is known.
    """
    order, found = list(sides), {name: [] for name in sides}
    for index in range(rounds):
        start = index % len(order)
        for name in (*order[start:], *order[:start]):
            found[name].append(sides[name]())
            if shown is not None:
                print(f"  {title}round {index + 1}/{rounds} {name}: {shown(found[name][-1])}", flush=True)
    return found


def median_ratio(above: Iterable[float], below: Iterable[float]) -> float:
    """The median over the rounds of one side's figure over another's, divided within each round."""
    return statistics.median(first / max(second, 1e-9) for first, second in zip(above, below, strict=True))


@dataclass(frozen=True)
class Rounds:
    """The figures of each side, one mapping per round."""

    figures: dict[str, list[dict[str, Any]]]

    def values(self, side: str, figure: str) -> list[Any]:
        return [outcome[figure] for outcome in self.figures[side]]

    def median(self, side: str, figure: str) -> float:
        return statistics.median(self.values(side, figure))

    def ratio(self, above: str, below: str, figure: str) -> float:
        return median_ratio(self.values(above, figure), self.values(below, figure))


@dataclass(frozen=True)
class Side:
    """A measured side: a module of benchmarks.sides, its options, and the interpreter that runs it."""

    name: str
    module: str
    options: tuple[str, ...] = ()
    python: Path = Path(sys.executable)


def run_side(side: Side, options: Sequence[str]) -> dict[str, Any]:
    """Run a side in a fresh process, and read the figures that it prints as its last line.

    It has one thread, and its environment does not change the allocator. Raises RuntimeError with the end of its output
    if it fails.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ALLOCATORS)}
    command = [str(side.python), "-m", side.module, *options, *side.options]
    done = subprocess.run(command, cwd=ROOT, env={**kept, **ONE_THREAD}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def resident(line: str) -> int:
    """The bytes in a line of /proc/self/status: VmRSS is the resident set, VmHWM its peak since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(each.split()[1]) * 1024 for each in lines if each.startswith(f"{line}:"))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def parser(description: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """A command line with --json, whose help is the module's docstring. rounds: the default of --rounds; None: none."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every round to this file")
    if rounds is not None:
        result.add_argument("--rounds", type=int, default=rounds, help="default: %(default)s")
    return result


def save_figures(path: Path | None, figures: Any) -> None:
    """Write the figures to the file of --json, if given."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")


def table(rows: Sequence[Sequence[str]], *, aligned: bool = True) -> str:
    """A Markdown table of rows of cells, the first row as its head. aligned: pad the cells, for a terminal."""
    widths = [max(len(row[column]) for row in rows) if aligned else 0 for column in range(len(rows[0]))]
    rule = ["-" * (width or 3) for width in widths]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(f"| {line} |" for line in (lines[0], " | ".join(rule), *lines[1:]))


def verdict(holds: bool) -> str:
    """A table's cell that says whether a goal was reached."""
    return "holds" if holds else "missed"
