"""What commands cost beside an older checkout: plan, runs with nothing to do, a first run, the start of a stage.

    python benchmarks/commands.py --before OLDER
    python benchmarks/commands.py --before OLDER --rounds 9 --nodes 100 --json figures.json

- plan, run of tiny.toml: where all is done; each side first runs the pipeline, in a minute or two.
- first run, no-op of N nodes: a chain of empty nodes in a new store without MLflow, and the same once more.
- stage: a run of one node whose function imports torch and transformers.

Seconds are wall and CPU seconds of the command and of all that it started; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT, Rounds, in_rounds, parser, save_figures, table

OPS = '''\
from attrs import frozen
from dsl.op import Artifact, op


@frozen
class Text(Artifact):
    """text.txt"""


@op(version=1, run="empty_ops:nothing")
@frozen(kw_only=True)
class Nothing:
    """Writes an empty file."""

    before: Text | None = None
    output = Text


@op(version=1, run="empty_ops:importing", key_libraries=("torch", "transformers"))
@frozen(kw_only=True)
class Importing:
    """Imports what a training needs."""

    output = Text


def nothing(config, stage):
    (stage.out_dir / "text.txt").touch()


def importing(config, stage):
    import torch._dynamo
    from transformers import AutoModelForCausalLM, AutoProcessor

    (stage.out_dir / "text.txt").write_text(f"{AutoModelForCausalLM} {AutoProcessor} {torch.__version__}")
'''
HEAD = '[pipeline]\nname = "empty"\nops = ["empty_ops.py"]\n[mlflow]\ntracking = false\n'
TINY = "pipelines/tiny.toml"


def main() -> None:
    options = parser(__doc__, rounds=7)
    options.add_argument("--before", type=Path, required=True, metavar="CHECKOUT", help="an older checkout")
    options.add_argument("--nodes", type=int, default=100)
    options.add_argument("--skip-tiny", action="store_true", help="only the rows that need no pipeline of models")
    given = options.parse_args()
    sides = {"ours": ROOT, "before": given.before.resolve()}
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: in_rounds({side: partial(row, side) for side in sides}, given.rounds, _shown, f"{name}: ")
            for name, row in _rows(sides, Path(folder), given.nodes, given.skip_tiny).items()
        }
    lines = [["", "ours", "before", "wall: ours / before", "CPU: ours / before"]]
    for name, figures in found.items():
        rounds = Rounds(figures)
        seconds = [f"{rounds.median(side, 'wall'):.2f} s, {rounds.median(side, 'cpu'):.2f} s CPU" for side in sides]
        lines.append([name, *seconds, *(f"{rounds.ratio('ours', 'before', each):.3f}" for each in ("wall", "cpu"))])
    print(table(lines))
    save_figures(given.json, found)


def _rows(
    sides: Mapping[str, Path], top: Path, nodes: int, skip_tiny: bool
) -> dict[str, Callable[[str], dict[str, float]]]:
    """The table's rows: title -> a function that measures the row for a side. What a measurement needs is made here."""
    (top / "empty_ops.py").write_text(OPS)
    chain = [f'[node.n{i}]\nop = "nothing"\n' + (f'before = "@n{i - 1}"\n' if i else "") for i in range(nodes)]
    (top / "chain.toml").write_text(HEAD + "".join(chain))
    (top / "stage.toml").write_text(HEAD + '[node.n]\nop = "importing"\n')
    number = itertools.count()

    def dflow(side: str, *arguments: str, store: str) -> dict[str, float]:
        return _measured(sides[side], *arguments, "--store", str(top / store), cwd=top)

    def fresh(side: str, file: str) -> dict[str, float]:
        return dflow(side, "run", file, store=f"fresh-{next(number)}")

    rows: dict[str, Callable[[str], dict[str, float]]] = {
        f"first run, {nodes} nodes": partial(fresh, file="chain.toml"),
        "stage that imports torch": partial(fresh, file="stage.toml"),
    }
    for side in sides:
        dflow(side, "run", "chain.toml", store=f"chain-{side}")
    rows[f"no-op, {nodes} nodes"] = lambda side: dflow(side, "run", "chain.toml", store=f"chain-{side}")
    if skip_tiny:
        return rows
    untracked = ("-s", "mlflow.tracking=false")
    files = {side: str(checkout / TINY) for side, checkout in sides.items()}
    for side in sides:
        dflow(side, "run", files[side], *untracked, store=f"tiny-{side}")
    for command in ("plan", "run"):
        rows[f"{command} of tiny.toml, all done"] = lambda side, command=command: dflow(
            side, command, files[side], *untracked, store=f"tiny-{side}"
        )
    return rows


def _measured(checkout: Path, *arguments: str, cwd: Path) -> dict[str, float]:
    """Measure `dflow ARGUMENTS` with a checkout's code. Raises RuntimeError with the end of its output if it fails."""
    command = [sys.executable, "-c", "import sys; from executor.cli import main; sys.exit(main())", *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{checkout}:{cwd}", "PYTHONSAFEPATH": "1"}
    output = cwd / "output.txt"
    with output.open("wb") as file:
        started = time.perf_counter()
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=file, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(arguments)} in {checkout}: exit code {process.returncode}\n{output.read_text()[-3000:]}"
        )
    return {"wall": wall, "cpu": used.ru_utime + used.ru_stime}


def _shown(seconds: Mapping[str, float]) -> str:
    return f"{seconds['wall']:.2f} s, {seconds['cpu']:.2f} s CPU"


if __name__ == "__main__":
    main()
