"""Run sides as fresh processes, interleaved in rounds, and keep every figure. Imports no torch: the parent stays small.

A round runs every side once, and the next round starts one side further on, so that what the machine does meanwhile
falls on all sides alike. A ratio of two sides is the median of the rounds' ratios, not the ratio of medians.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
ALLOCATORS = ("LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class Side:
    """A column of the table: a module of benchmarks.sides, its options, the interpreter that runs it."""

    name: str
    module: str
    options: tuple[str, ...] = ()
    python: Path = Path(sys.executable)


@dataclass(frozen=True)
class Setting:
    """The outcomes of all rounds at one setting: per side its figures, one mapping a round."""

    context: int
    anchors: int
    figures: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def median(self, side: str, figure: str) -> float:
        return statistics.median(round_[figure] for round_ in self.figures[side])

    def ratio(self, above: str, below: str, figure: str) -> float:
        """Median over the rounds of one side's figure over another's, taken within each round."""
        pairs = zip(self.figures[above], self.figures[below], strict=True)
        return statistics.median(first[figure] / max(second[figure], 1e-9) for first, second in pairs)


def run_setting(
    sides: Sequence[Side], context: int, anchors: int, options: Sequence[str], rounds: int, saved: Mapping[str, Path]
) -> Setting:
    """All rounds of one setting. saved: for some sides the file that gets the gradients of the last round."""
    setting = Setting(context, anchors)
    at = ["--context", str(context), "--anchors", str(anchors), *options]
    for index in range(rounds):
        start = index % len(sides)
        for side in (*sides[start:], *sides[:start]):
            save = ["--save", str(saved[side.name])] if side.name in saved else []
            outcome = run_side(side, [*at, *side.options, *save])
            setting.figures.setdefault(side.name, []).append(outcome)
            print(
                f"  {context}/{anchors} round {index + 1}/{rounds} {side.name}: {outcome['seconds']:.3f} s", flush=True
            )
    return setting


def run_side(side: Side, options: Sequence[str]) -> dict[str, Any]:
    """The figures of one fresh process. Raises RuntimeError with the end of its output where it fails."""
    command = [str(side.python), "-m", side.module, *options]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{side.name} failed ({' '.join(command)}):\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def differing_losses(setting: Setting, reference: str, limit: float) -> list[str]:
    """What to say of every side whose loss is further from the reference's than that share of it; they share a problem.

    A side that computes something else has nothing to be compared by.
    """
    expected = setting.median(reference, "loss")
    found = {side: setting.median(side, "loss") for side in setting.figures if "loss" in setting.figures[side][0]}
    return [
        f"{side}: its loss is {loss:.6g}, that of {reference} {expected:.6g}; both compute the same step"
        for side, loss in found.items()
        if not abs(loss - expected) <= limit * abs(expected)
    ]


def _environment() -> dict[str, str]:
    """This environment with one thread, and without anything that would change an allocator."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ALLOCATORS)}
    return {**kept, **ONE_THREAD}


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a plain table, the first row as its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "| " + " | ".join("-" * width for width in widths) + " |", *lines[1:]])
