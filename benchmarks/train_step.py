"""Our training step against the dense reference, speculators and the matmul floor, on one CPU thread.

    python benchmarks/train_step.py                                   # the three settings that the goals are set for
    python benchmarks/train_step.py --install-speculators             # creates the environment that speculators runs in
    python benchmarks/train_step.py --algorithms                      # dflash2, dspark and lilicorr beside plain DFlash
    python benchmarks/train_step.py --context 1024 --anchors 128 --rounds 5 --chunk 64 --json figures.json

One step is forward, loss and backward, no optimizer, of one sequence in float32. What is measured, and how:
benchmarks/sides/measured.py; the sides: the other modules there.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from attrs import frozen
from safetensors.numpy import load_file

from benchmarks.environment import default_folder, install, interpreter
from benchmarks.harness import Rounds, Side, in_rounds, parser, run_side, save_figures, table, verdict
from benchmarks.sides.problem import Sizes

OURS, CHUNKED, DENSE, FLOOR, SPECULATORS = "ours", "ours, chunked", "dense reference", "matmul floor", "speculators"
L1, DFLASH2, DSPARK = "ours with l1, chunked", "dflash2, chunked", "dspark, chunked"
LILICORR = "lilicorr, chunked"
PEERS = {DFLASH2: "speculators dflash2", DSPARK: "speculators dspark"}
SPECFORGE = {CHUNKED: "SpecForge", DSPARK: "SpecForge dspark"}  # it has no DFlash2
MODELOPT = {
    CHUNKED: "ModelOpt",
    DFLASH2: "ModelOpt dflash2",
    DSPARK: "ModelOpt dspark",
    LILICORR: "ModelOpt lilicorr",
}
OTHERS = (SPECULATORS, *PEERS.values(), *SPECFORGE.values(), *MODELOPT.values())
OF_ALGORITHMS = (CHUNKED, L1, DFLASH2, DSPARK, LILICORR, *OTHERS)
FLOORS = {DFLASH2: "floor of dflash2", DSPARK: "floor of dspark", LILICORR: "floor of lilicorr"}
STEP_GOALS, MEMORY_GOAL = {DFLASH2: 1.20, DSPARK: 1.35, LILICORR: 1.35}, 1.15  # beside plain DFlash, chunked
SIZES = [field.name for field in fields(Sizes) if field.name not in ("context", "anchors")]
CONTEXTS, ANCHORS = (2048, 2048, 4096), (128, 256, 512)
EXPONENT = 0.1


@frozen
class Goals:
    """The goals of one setting.

    Times are factors against the dense reference and the floor; memory is a fraction of the dense reference's. The
    stretch goal is for the chunked step, and asks for all three figures at once.
    """

    faster: float
    floor: float
    chunked_memory: float
    chunked_faster: float
    stretch_faster: float
    stretch_memory: float
    stretch_floor: float


GOALS = {
    (2048, 128): Goals(2.7, 1.5, 1 / 8, 2.4, 3.0, 1 / 8, 1.25),
    (2048, 256): Goals(3.4, 1.5, 1 / 11, 3.0, 4.0, 1 / 12, 1.25),
    (4096, 512): Goals(4.2, 1.5, 1 / 18, 3.8, 5.0, 1 / 20, 1.3),
}
Settings = dict[tuple[int, int], Rounds]  # by context and anchors


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    if arguments.install_speculators:
        install(arguments.speculators_venv)
    sides = _sides(arguments)
    sizes = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in SIZES if getattr(arguments, name)]
    settings: Settings = {}
    exactness = []
    with tempfile.TemporaryDirectory() as folder:
        for context, anchors in zip(arguments.context, arguments.anchors, strict=True):
            at = [f"--context={context}", f"--anchors={anchors}", *sizes]
            saved = {name: Path(folder) / f"{context}-{anchors}-{name}" for name in (OURS, CHUNKED, DENSE, "float64")}
            runs = {side.name: partial(run_side, side, [*at, *_save(side.name, saved)]) for side in sides}
            shown = "{seconds:.3f} s".format_map
            rounds = Rounds(in_rounds(runs, arguments.rounds, shown, f"{context}/{anchors} "))
            settings[context, anchors] = rounds
            losses = {name: rounds.figures[name][-1]["loss"] for name in saved if name in rounds.figures}
            if arguments.float64 and DENSE in losses:  # not a measurement
                options = [*at, "--dtype=float64", f"--save={saved['float64']}"]
                losses["float64"] = run_side(Side("float64", "benchmarks.sides.dense"), options)["loss"]
            exactness += _exactness(f"{context} / {anchors}", saved, losses)
    parts = [_figures_table(settings), _goals_table(settings), _exactness_table(exactness), _growth(settings)]
    if arguments.algorithms:
        parts = [_algorithms_figures(settings), _algorithms_table(settings)]
    print("\n\n".join(["", *filter(None, parts)]))
    figures = [
        {"context": context, "anchors": anchors, "figures": rounds.figures}
        for (context, anchors), rounds in settings.items()
    ]
    save_figures(arguments.json, {"settings": figures, "exactness": exactness})
    return 0


def _save(side: str, saved: dict[str, Path]) -> list[str]:
    """The option that names the file for the gradients of the last round."""
    return [f"--save={saved[side]}"] if side in saved else []


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__, rounds=3)
    options.add_argument("--context", type=int, nargs="+", help="context lengths, one a setting")
    options.add_argument("--anchors", type=int, nargs="+", help="numbers of anchors, one a setting")
    options.add_argument(
        "--algorithms", action="store_true", help="the steps of dflash2, dspark and lilicorr beside plain DFlash's"
    )
    options.add_argument("--rank", type=int, help="of their tables; default: a 16th of the hidden size")
    options.add_argument("--chunk", type=int, default=32, help="anchors in one pass of the chunked step")
    options.add_argument("--sides", nargs="+", choices=(OURS, DENSE, FLOOR, *OF_ALGORITHMS, *FLOORS.values()))
    for name in SIZES:
        options.add_argument(f"--{name.replace('_', '-')}", type=int)
    options.add_argument("--speculators-venv", type=Path, default=default_folder(), metavar="FOLDER")
    options.add_argument("--install-speculators", action="store_true", help="create that environment first, with pip")
    options.add_argument("--float64", action="store_true", help="check exactness by the dense reference in float64 too")
    arguments = options.parse_args(argv)
    settings = 1 if arguments.algorithms else len(CONTEXTS)
    arguments.context = arguments.context or CONTEXTS[:settings]
    arguments.anchors = arguments.anchors or ANCHORS[:settings]
    if len(arguments.context) != len(arguments.anchors):
        options.error("--context and --anchors: one number each for every setting")
    return arguments


def _sides(arguments: argparse.Namespace) -> list[Side]:
    """The chosen sides; those of other projects only if they are installed."""
    ours, peer, floor = "benchmarks.sides.ours", "benchmarks.sides.speculators_peer", "benchmarks.sides.floor"
    chunk = ("--chunk", str(arguments.chunk))
    rank = () if arguments.rank is None else ("--rank", str(arguments.rank))
    names = {DFLASH2: "dflash2", DSPARK: "dspark", LILICORR: "lilicorr"}
    algorithms = {side: (f"--algorithm={name}", *rank) for side, name in names.items()}
    plain = Side(CHUNKED, ours, chunk)
    if arguments.algorithms:
        sides = [plain, Side(L1, ours, (*chunk, "--loss=l1"))]
        sides += [Side(name, ours, (*chunk, *options)) for name, options in algorithms.items()]
        sides += [Side(FLOOR, floor), *(Side(FLOORS[name], floor, options) for name, options in algorithms.items())]
    else:
        sides = [Side(OURS, ours), plain, Side(DENSE, "benchmarks.sides.dense"), Side(FLOOR, floor)]
    if python := interpreter(arguments.speculators_venv):
        sides.append(Side(SPECULATORS, peer, python=python))
        if arguments.algorithms:
            sides += [Side(other, peer, algorithms[name], python) for name, other in PEERS.items()]
    own = {CHUNKED: (), **algorithms}
    for package, peers in (("specforge", SPECFORGE), ("modelopt", MODELOPT)):
        if arguments.algorithms and find_spec(package):
            sides += [Side(name, f"benchmarks.sides.{package}_peer", own[side]) for side, name in peers.items()]
    return [side for side in sides if arguments.sides is None or side.name in arguments.sides]


def _exactness(setting: str, saved: dict[str, Path], losses: dict[str, float]) -> list[dict[str, object]]:
    """Relative differences of loss and gradients, for each side against the dense reference and against float64."""
    rows = []
    for reference in (name for name in (DENSE, "float64") if name in losses):
        expected = load_file(saved[reference])
        for side in (name for name in losses if name not in (reference, "float64")):
            gradients = load_file(saved[side])
            differences = {name: _relative(gradients[name], value) for name, value in expected.items()}
            worst = max(differences, key=differences.__getitem__)
            rows.append(
                {
                    "setting": setting,
                    "side": side,
                    "against": reference,
                    "loss": abs(losses[side] - losses[reference]) / abs(losses[reference]),
                    "gradients": _relative(_flat(gradients, expected), _flat(expected, expected)),
                    "worst": differences[worst],
                    "of": worst,
                }
            )
    return rows


def _flat(arrays: dict[str, np.ndarray], names: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([arrays[name].ravel() for name in names])


def _relative(array: np.ndarray, expected: np.ndarray) -> float:
    """The norm of the difference over the norm of the expected array."""
    difference = array.astype(np.float64) - expected.astype(np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected.astype(np.float64)))


def _algorithms_figures(settings: Settings) -> str:
    rows = [["context / anchors", *OF_ALGORITHMS]]
    for (context, anchors), rounds in settings.items():
        rows.append([f"{context} / {anchors}", *(_figures(rounds, side) for side in OF_ALGORITHMS)])
    return "Medians: CPU seconds and MiB of one step\n" + table(rows)


def _algorithms_table(settings: Settings) -> str:
    """The Markdown table of each algorithm beside plain DFlash, ours and speculators', and beside other projects'
    steps. floor: the same ratio of the products that both need.
    """
    rows = [["context / anchors", "compared", "seconds", "floor", "memory", "wanted", "holds"]]
    for (context, anchors), rounds in settings.items():
        pairs = [
            *((name, CHUNKED) for name in STEP_GOALS),
            (DSPARK, L1),
            *((other, SPECULATORS) for other in PEERS.values()),
            *PEERS.items(),
            *SPECFORGE.items(),
            *MODELOPT.items(),
        ]
        for above, below in pairs:
            if {above, below} <= rounds.figures.keys():
                seconds, mib = (rounds.ratio(above, below, figure) for figure in ("seconds", "mib"))
                floor, wanted, holds = "", "", ""
                if below == CHUNKED and {FLOOR, FLOORS[above]} <= rounds.figures.keys():
                    floor = f"{rounds.ratio(FLOORS[above], FLOOR, 'seconds'):.2f}x"
                if below == CHUNKED:
                    wanted = f"<= {STEP_GOALS[above]:.2f}x, memory <= {MEMORY_GOAL:.2f}x"
                    holds = verdict(seconds <= STEP_GOALS[above] and mib <= MEMORY_GOAL)
                compared = f"{above} : {below}"
                at = f"{context} / {anchors}"
                rows.append([at, compared, f"{seconds:.2f}x", floor, f"{mib:.2f}x", wanted, holds])
    return "Ratios: medians of the rounds' ratios\n" + table(rows) if len(rows) > 1 else ""


def _figures_table(settings: Settings) -> str:
    sides = (OURS, CHUNKED, DENSE, SPECULATORS, FLOOR)
    rows = [["context / anchors", *sides]]
    for (context, anchors), rounds in settings.items():
        rows.append([f"{context} / {anchors}", *(_figures(rounds, side) for side in sides)])
    return "Medians: CPU seconds and MiB of one step\n" + table(rows)


def _figures(rounds: Rounds, side: str) -> str:
    if side not in rounds.figures:
        return "not installed" if side in OTHERS else "not run"
    seconds = f"{rounds.median(side, 'seconds'):.3f} s"
    return seconds if side == FLOOR else f"{seconds}, {rounds.median(side, 'mib'):.0f} MiB"


def _goals_table(settings: Settings) -> str:
    rows = [["context / anchors", "goal", "wanted", "measured", "holds"]]
    for (context, anchors), rounds in settings.items():
        if {OURS, CHUNKED, DENSE, FLOOR} <= set(rounds.figures):
            found = _goal_rows(rounds, GOALS.get((context, anchors)))
            rows += [[f"{context} / {anchors}", *cells] for cells in found]
    return "Ratios: medians of the rounds' ratios\n" + table(rows) if len(rows) > 1 else ""


def _goal_rows(rounds: Rounds, goals: Goals | None) -> list[list[str]]:
    faster = {side: rounds.ratio(DENSE, side, "seconds") for side in (OURS, CHUNKED)}
    floor = {side: rounds.ratio(side, FLOOR, "seconds") for side in (OURS, CHUNKED)}
    less = rounds.ratio(DENSE, CHUNKED, "mib")
    if goals is None:
        measured = f"{faster[OURS]:.2f}x; {floor[OURS]:.2f}x; chunked 1/{less:.1f}, {faster[CHUNKED]:.2f}x"
        return [["faster than the dense reference; of the floor; memory", "none set", measured, ""]]
    is_faster = faster[CHUNKED] >= goals.stretch_faster
    reaches_stretch = is_faster and less >= 1 / goals.stretch_memory and floor[CHUNKED] <= goals.stretch_floor
    stretch_text = ", ".join(
        [
            f">= {goals.stretch_faster:g}x faster",
            f"<= 1/{1 / goals.stretch_memory:.0f}",
            f"<= {goals.stretch_floor:g}x of the floor",
        ]
    )
    unchunked, chunked = f"{faster[OURS]:.2f}x", f"{faster[CHUNKED]:.2f}x"
    memory, of_floor = f"<= 1/{1 / goals.chunked_memory:.0f}", f"{floor[OURS]:.2f}x"
    all_three = f"{chunked}, 1/{less:.1f}, {floor[CHUNKED]:.2f}x"
    rows = [
        ("time against the dense reference", f">= {goals.faster:g}x faster", unchunked, faster[OURS] >= goals.faster),
        ("time against the floor", f"<= {goals.floor:g}x", of_floor, floor[OURS] <= goals.floor),
        ("chunked: memory", memory, f"1/{less:.1f}", less >= 1 / goals.chunked_memory),
        ("chunked: time", f">= {goals.chunked_faster:g}x faster", chunked, faster[CHUNKED] >= goals.chunked_faster),
        ("stretch goal, chunked", stretch_text, all_three, reaches_stretch),
    ]
    return [[*cells, verdict(holds)] for *cells, holds in rows]


def _exactness_table(rows: Sequence[dict[str, object]]) -> str:
    if not rows:
        return ""
    head = ["context / anchors", "side", "against", "loss", "all gradients", "worst parameter"]
    cells = []
    for row in rows:
        numbers = f"{row['loss']:.1e}", f"{row['gradients']:.1e}", f"{row['worst']:.1e} ({row['of']})"
        cells.append([row["setting"], row["side"], row["against"], *numbers])
    return "Exactness: relative differences (norm of the difference over the norm)\n" + table([head, *cells])


def _growth(settings: Settings) -> str:
    """Lines on how chunked memory grows with the number of anchors, between settings of the same context."""
    known = [(*size, rounds.median(CHUNKED, "mib")) for size, rounds in settings.items() if CHUNKED in rounds.figures]
    lines = []
    for (context, few, before), (other, many, after) in itertools.pairwise(known):
        if context == other and few != many:
            exponent = math.log(max(after / max(before, 1e-9), 1e-9)) / math.log(many / few)
            lines.append(
                f"Chunked memory from {few} to {many} anchors at {context}: exponent {exponent:.3f} "
                f"(goal <= {EXPONENT}): {verdict(exponent <= EXPONENT)}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
