"""Preprocessing compared with the plain loop over transformers' processor, and its memory for data sets of two sizes.

    python benchmarks/preprocess.py
    python benchmarks/preprocess.py --rounds 9 --words 60 600 --sizes 1000 20000 --json figures.json

What each side does, and how it is measured: benchmarks/sides/preprocess.py. A ratio is the median of the rounds'.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Side, median_ratio, parser, run_side, save_figures, table, verdict
from benchmarks.preprocess_data import write_jsonl

MODULE = "benchmarks.sides.preprocess"
TEXT_GOAL, IMAGE_GOAL, MEMORY_GOAL = 1.3, 1.0, 1.1


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__, rounds=9)
    options.add_argument("--samples", type=int, default=200, help="text samples of a round")
    options.add_argument("--images", type=int, default=40, help="image samples of a round")
    options.add_argument("--words", type=int, nargs="+", default=(60, 600), help="words of an answer, one a setting")
    options.add_argument("--sizes", type=int, nargs=2, default=(1000, 20000), help="samples whose memory is compared")
    arguments = options.parse_args(argv)
    settings = [("text", words, arguments.samples, TEXT_GOAL) for words in arguments.words]
    settings += [(kind, arguments.words[-1], arguments.samples, TEXT_GOAL) for kind in ("emoji", "chinese")]
    settings.append(("images", arguments.words[0], arguments.images, IMAGE_GOAL))
    speeds = [_speed(*setting, arguments.rounds) for setting in settings]
    memory = _memory(arguments.sizes)
    print(_report(speeds, memory))
    save_figures(arguments.json, {"speed": speeds, "memory": memory})
    return 0


def _speed(kind: str, words: int, samples: int, goal: float, rounds: int) -> dict[str, Any]:
    options = ["speed", f"--kind={kind}", f"--words={words}", f"--samples={samples}", f"--rounds={rounds}"]
    figures = run_side(Side(kind, MODULE), options)
    seconds = figures["rounds"]
    per_second = {side: samples / max(statistics.median(seconds[side]), 1e-9) for side in ("ours", "loop")}
    ratio, name = median_ratio(seconds["loop"], seconds["ours"]), f"{kind}, {round(figures['tokens'] / samples)} tokens"
    return {"setting": name, "goal": goal, "ratio": ratio, "per_second": per_second, **figures}


def _memory(sizes: Sequence[int]) -> list[dict[str, Any]]:
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for samples in sizes:
            data = Path(folder) / f"{samples}.jsonl"
            write_jsonl(data, samples, words=60)
            outcome = run_side(Side("memory", MODULE), ["memory", f"--data={data}"])
            figures.append({"samples": samples, **outcome})
    return figures


def _report(speeds: Sequence[dict[str, Any]], memory: Sequence[dict[str, Any]]) -> str:
    rows = [["setting", "ours, samples/s", "loop, samples/s", "ratio", "goal", "", "same ids and pixels"]]
    for speed in speeds:
        each = [f"{speed['per_second'][side]:.0f}" for side in ("ours", "loop")]
        reached = [f"{speed['ratio']:.2f}x", f">= {speed['goal']:g}x", verdict(speed["ratio"] >= speed["goal"])]
        rows.append([speed["setting"], *each, *reached, "yes" if speed["same"] else "NO"])
    small, large = memory
    growth = large["mib"] / small["mib"]
    flat = f"memory, {small['samples']} and {large['samples']} samples: {small['mib']:.0f} and {large['mib']:.0f} MiB, "
    return (
        "Samples per CPU second of one core; ours with loss mask and prompt length, the loop with ids and pixels only\n"
        f"{table(rows)}\n\nPeak {flat}{growth:.2f}x (goal <= {MEMORY_GOAL}x): {verdict(growth <= MEMORY_GOAL)}"
    )


if __name__ == "__main__":
    sys.exit(main())
