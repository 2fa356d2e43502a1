"""Our training step against the dense reference, speculators and the matmul floor, on one CPU thread.

    python benchmarks/train_step.py                                   # the three settings that the goals are set for
    python benchmarks/train_step.py --install-speculators             # makes the environment that speculators runs in
    python benchmarks/train_step.py --context 1024 --anchors 128 --rounds 5 --chunk 64 --json figures.json

One step is forward, loss and backward, no optimizer, of one sequence in float32. What is measured, and how:
benchmarks/sides/measured.py; who takes part: the other modules there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from attrs import frozen
from safetensors.numpy import load_file

from benchmarks.environment import default_folder, install, interpreter
from benchmarks.rounds import Setting, Side, run_setting, run_side, table

OURS, CHUNKED, DENSE, FLOOR, SPECULATORS = "ours", "ours, chunked", "dense reference", "matmul floor", "speculators"
SIZES = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "block", "target_layers")
CONTEXTS, ANCHORS = (2048, 2048, 4096), (128, 256, 512)
EXPONENT = 0.1


@frozen
class Goals:
    """Of one setting, times as factors against the dense reference and the floor, memory as a part of the dense
    reference's; the dream is asked of the chunked step, all three figures at once."""

    faster: float
    floor: float
    chunked_memory: float
    chunked_faster: float
    dream_faster: float
    dream_memory: float
    dream_floor: float


GOALS = {
    (2048, 128): Goals(2.7, 1.5, 1 / 8, 2.4, 3.0, 1 / 8, 1.25),
    (2048, 256): Goals(3.4, 1.5, 1 / 11, 3.0, 4.0, 1 / 12, 1.25),
    (4096, 512): Goals(4.2, 1.5, 1 / 18, 3.8, 5.0, 1 / 20, 1.3),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    if arguments.install_speculators:
        install(arguments.speculators_venv)
    sides = _sides(arguments)
    sizes = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in SIZES if getattr(arguments, name)]
    settings, exactness = [], []
    with tempfile.TemporaryDirectory() as folder:
        for context, anchors in zip(arguments.context, arguments.anchors, strict=True):
            names = [side.name for side in sides if side.name in (OURS, CHUNKED, DENSE)]
            saved = {name: Path(folder) / f"{context}-{anchors}-{index}" for index, name in enumerate(names)}
            setting = run_setting(sides, context, anchors, sizes, arguments.rounds, saved)
            settings.append(setting)
            truth = _float64(sides, setting, sizes, saved, Path(folder)) if arguments.float64 else None
            exactness += _exactness(setting, saved, truth)
    print(_report(settings, exactness))
    if arguments.json:
        figures = [{"context": s.context, "anchors": s.anchors, "figures": s.figures} for s in settings]
        arguments.json.write_text(json.dumps({"settings": figures, "exactness": exactness}, indent=2) + "\n")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, nargs="+", default=CONTEXTS, help="context lengths, one a setting")
    parser.add_argument("--anchors", type=int, nargs="+", default=ANCHORS, help="numbers of anchors, one a setting")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=32, help="anchors in one pass of the chunked step")
    parser.add_argument("--sides", nargs="+", choices=(OURS, CHUNKED, DENSE, FLOOR, SPECULATORS))
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--speculators-venv", type=Path, default=default_folder(), metavar="FOLDER")
    parser.add_argument("--install-speculators", action="store_true", help="make that environment first, with pip")
    parser.add_argument("--float64", action="store_true", help="judge exactness by the dense reference in float64, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures there")
    arguments = parser.parse_args(argv)
    if len(arguments.context) != len(arguments.anchors):
        parser.error("--context and --anchors: one number each for every setting")
    return arguments


def _sides(arguments: argparse.Namespace) -> list[Side]:
    """The sides asked for; speculators only where it is installed."""
    sides = [
        Side(OURS, "benchmarks.sides.ours"),
        Side(CHUNKED, "benchmarks.sides.ours", ("--chunk", str(arguments.chunk))),
        Side(DENSE, "benchmarks.sides.dense"),
        Side(FLOOR, "benchmarks.sides.floor"),
    ]
    python = interpreter(arguments.speculators_venv)
    if python:
        sides.append(Side(SPECULATORS, "benchmarks.sides.speculators_peer", python=python))
    return [side for side in sides if arguments.sides is None or side.name in arguments.sides]


def _float64(
    sides: Sequence[Side], setting: Setting, sizes: Sequence[str], saved: dict[str, Path], folder: Path
) -> dict[str, object] | None:
    """The dense reference's loss in float64, its gradients in saved["float64"]; not a measurement."""
    dense = next((side for side in sides if side.name == DENSE), None)
    if dense is None:
        return None
    saved["float64"] = folder / f"{setting.context}-{setting.anchors}-float64"
    at = [f"--context={setting.context}", f"--anchors={setting.anchors}", "--dtype=float64"]
    return run_side(dense, [*at, *sizes, f"--save={saved['float64']}"])


def _exactness(setting: Setting, saved: dict[str, Path], truth: dict[str, object] | None) -> list[dict[str, object]]:
    """Relative differences of loss and gradients, each side against the dense reference and against float64."""
    references = {}
    if DENSE in saved:
        references[DENSE] = setting.figures[DENSE][-1]["loss"]
    if truth is not None:
        references["float64"] = truth["loss"]
    rows = []
    for reference, loss in references.items():
        expected = load_file(saved[reference])
        for side in (name for name in (OURS, CHUNKED, DENSE) if name in saved and name != reference):
            gradients, got = load_file(saved[side]), setting.figures[side][-1]["loss"]
            differences = {name: _relative(gradients[name], value) for name, value in expected.items()}
            worst = max(differences, key=differences.__getitem__)
            rows.append(
                {
                    "setting": f"{setting.context} / {setting.anchors}",
                    "side": side,
                    "against": reference,
                    "loss": abs(got - loss) / abs(loss),
                    "gradients": _relative(_flat(gradients, expected), _flat(expected, expected)),
                    "worst": differences[worst],
                    "of": worst,
                }
            )
    return rows


def _flat(arrays: dict[str, np.ndarray], names: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([arrays[name].ravel() for name in names])


def _relative(array: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over the norm of what is expected."""
    difference = array.astype(np.float64) - expected.astype(np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected.astype(np.float64)))


def _report(settings: Sequence[Setting], exactness: Sequence[dict[str, object]]) -> str:
    parts = [_figures_table(settings), _goals_table(settings), _exactness_table(exactness), _growth(settings)]
    return "\n\n".join(["", *(part for part in parts if part)])


def _figures_table(settings: Sequence[Setting]) -> str:
    sides = (OURS, CHUNKED, DENSE, SPECULATORS, FLOOR)
    rows = [["context / anchors", *sides]]
    for setting in settings:
        rows.append([f"{setting.context} / {setting.anchors}", *(_figures(setting, side) for side in sides)])
    return "Medians: CPU seconds and MiB of one step\n" + table(rows)


def _figures(setting: Setting, side: str) -> str:
    if side not in setting.figures:
        return "not installed" if side == SPECULATORS else "not run"
    seconds = f"{setting.median(side, 'seconds'):.3f} s"
    return seconds if side == FLOOR else f"{seconds}, {setting.median(side, 'mib'):.0f} MiB"


def _goals_table(settings: Sequence[Setting]) -> str:
    rows = [["context / anchors", "goal", "wanted", "measured", "holds"]]
    for setting in settings:
        if {OURS, CHUNKED, DENSE, FLOOR} <= set(setting.figures):
            rows += _goal_rows(setting, GOALS.get((setting.context, setting.anchors)))
    return "Ratios: medians of the rounds' ratios\n" + table(rows) if len(rows) > 1 else ""


def _goal_rows(setting: Setting, goals: Goals | None) -> list[list[str]]:
    faster = {side: setting.ratio(DENSE, side, "seconds") for side in (OURS, CHUNKED)}
    floor = {side: setting.ratio(side, FLOOR, "seconds") for side in (OURS, CHUNKED)}
    memory = setting.ratio(DENSE, CHUNKED, "mib")
    name = f"{setting.context} / {setting.anchors}"
    if goals is None:
        measured = f"{faster[OURS]:.2f}x; {floor[OURS]:.2f}x; chunked 1/{memory:.1f}, {faster[CHUNKED]:.2f}x"
        return [[name, "faster than the dense reference; of the floor; memory", "none set", measured, ""]]
    dream = (
        faster[CHUNKED] >= goals.dream_faster
        and memory >= 1 / goals.dream_memory
        and floor[CHUNKED] <= goals.dream_floor
    )
    rows = [
        ["time against the dense reference", _at_least(goals.faster), faster[OURS], faster[OURS] >= goals.faster],
        ["time against the floor", f"<= {goals.floor:g}x", floor[OURS], floor[OURS] <= goals.floor],
        ["chunked: memory", f"<= 1/{1 / goals.chunked_memory:.0f}", 1 / memory, memory >= 1 / goals.chunked_memory],
        ["chunked: time", _at_least(goals.chunked_faster), faster[CHUNKED], faster[CHUNKED] >= goals.chunked_faster],
    ]
    wanted = (
        f"{_at_least(goals.dream_faster)}, <= 1/{1 / goals.dream_memory:.0f}, <= {goals.dream_floor:g}x of the floor"
    )
    got = f"{faster[CHUNKED]:.2f}x, 1/{memory:.1f}, {floor[CHUNKED]:.2f}x"
    shown = [[name, goal, want, _shown(goal, value), _holds(holds)] for goal, want, value, holds in rows]
    return [*shown, [name, "the dream, chunked", wanted, got, _holds(dream)]]


def _at_least(factor: float) -> str:
    return f">= {factor:g}x faster"


def _shown(goal: str, value: float) -> str:
    return f"1/{1 / value:.1f}" if goal.endswith("memory") else f"{value:.2f}x"


def _holds(holds: bool) -> str:
    return "yes" if holds else "NO"


def _exactness_table(rows: Sequence[dict[str, object]]) -> str:
    if not rows:
        return ""
    head = ["context / anchors", "side", "against", "loss", "all gradients", "worst parameter"]
    cells = []
    for row in rows:
        numbers = f"{row['loss']:.1e}", f"{row['gradients']:.1e}", f"{row['worst']:.1e} ({row['of']})"
        cells.append([row["setting"], row["side"], row["against"], *numbers])
    return "Exactness: relative differences (norm of the difference over the norm)\n" + table([head, *cells])


def _growth(settings: Sequence[Setting]) -> str:
    """How chunked memory grows with the number of anchors, between settings of the same context."""
    known = [setting for setting in settings if CHUNKED in setting.figures]
    lines = []
    for first, second in itertools.pairwise(known):
        if first.context == second.context and first.anchors != second.anchors:
            grown = second.median(CHUNKED, "mib") / max(first.median(CHUNKED, "mib"), 1e-9)
            exponent = math.log(max(grown, 1e-9)) / math.log(second.anchors / first.anchors)
            lines.append(
                f"Chunked memory from {first.anchors} to {second.anchors} anchors at {first.context}: exponent "
                f"{exponent:.3f} (goal <= {EXPONENT}): {_holds(exponent <= EXPONENT)}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
