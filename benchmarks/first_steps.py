"""What a new user waits for: a first run that is sent to MLflow, `dflow doctor`, a smoke run; and the foreseen memory.

    python benchmarks/first_steps.py                                  # all rows, of this checkout
    python benchmarks/first_steps.py --before OLDER --rounds 3        # beside an older checkout, in alternating rounds
    python benchmarks/first_steps.py --rows tracking doctor --json figures.json
    python benchmarks/first_steps.py --memory runs                    # foreseen memory against the measured one

- tracking: three ops that do nothing (one metric each) in a new store, with MLflow and without, until the command has
  ended; then MLflow's database is asked for the metrics, and the row says how many it had. `new user` is the first run
  with an empty cache folder, `new store` a later one, in another folder.
- doctor: `dflow doctor`.
- smoke: `dflow run pipelines/vlm_dflash.toml --smoke 16` in a new store.

Seconds are wall-clock medians of the rounds. With --memory nothing is timed: for each node of the store's latest run,
what `dflow plan` foresees where the node's inputs exist, over the peak that was measured of its processes.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT, in_rounds, parser, save_figures, table, verdict
from executor.planning.estimates import graph_estimates
from executor.records.run_record import find_record
from executor.store.artifact_store import Store

DFLOW = (sys.executable, "-c", "import sys; from executor.cli import main; sys.exit(main())")
OPS = '''\
from attrs import frozen
from dsl.op import Artifact, op


@frozen
class Text(Artifact):
    """text.txt"""


@op(version=1, run="nothing_ops:nothing")
@frozen(kw_only=True)
class Nothing:
    """Writes an empty file."""

    before: Text | None = None
    output = Text


def nothing(config, stage):
    (stage.out_dir / "text.txt").touch()
    stage.log({"nothing/done": 1.0}, step=1)
'''
NODES = ("first", "second", "third")
PIPELINE = """\
[pipeline]
name = "nothing"
ops = ["nothing_ops.py"]
[mlflow]
tracking = {tracking}
[node.first]
op = "nothing"
[node.second]
op = "nothing"
before = "@first"
[node.third]
op = "nothing"
before = "@second"
"""
COUNT = """\
import sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
runs = [run for each in client.search_experiments() for run in client.search_runs([each.experiment_id])]
print(sum("nothing/done" in run.data.metrics and run.info.status == "FINISHED" for run in runs))
"""
GOALS = {"tracking, new store, over untracked": 2.0, "doctor": 10.0, "smoke": 150.0}
ROWS = ("tracking", "doctor", "smoke")
WITHIN = 1.3  # of the measured peak


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--before", type=Path, metavar="CHECKOUT", help="an older checkout, for a second column")
    options.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    options.add_argument("--memory", type=Path, metavar="RUNS", help="a store with a finished run of the pipeline")
    given = options.parse_args(arguments)
    if given.memory is not None:
        rows = _memory(Store.open(given.memory, write=False))
        print(table([("node", "foreseen", "measured", "ratio", f"within {WITHIN}"), *rows]))
        save_figures(given.json, rows)
        return
    sides = {"ours": ROOT, **({"before": given.before.resolve()} if given.before else {})}
    found = {
        row: in_rounds({name: partial(MEASURES[row], side) for name, side in sides.items()}, given.rounds, str)
        for row in given.rows
    }
    print(table([("row", "goal", *sides, "verdict"), *_cells(found, list(sides))]))
    save_figures(given.json, found)


def _cells(found: Mapping[str, Mapping[str, list[dict[str, float]]]], sides: list[str]) -> list[tuple[str, ...]]:
    rows = []
    for outcomes in found.values():
        for name in outcomes[sides[0]][0]:
            seconds = [statistics.median(outcome[name] for outcome in outcomes[side]) for side in sides]
            goal = GOALS.get(name)
            wanted = "" if goal is None else f"<= {goal:g} s"
            is_count = name.endswith("found")
            shown = [f"{value:g}" if is_count else f"{value:.1f} s" for value in seconds]
            rows.append((name, wanted, *shown, "" if goal is None else verdict(seconds[0] <= goal)))
    return rows


def _tracking(checkout: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        plain = _nothing(checkout, home, "untracked", "false")
        first = _nothing(checkout, home, "first", "true")
        second = _nothing(checkout, home, "second", "true")
        asked = [sys.executable, "-c", COUNT, f"sqlite:///{home / 'second' / 'runs' / 'mlflow.db'}"]
        counted = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return {
        "tracking, untracked": plain,
        "tracking, new user": first,
        "tracking, new store": second,
        "tracking, new store, over untracked": second - plain,
        "tracking, nodes with their metric found": float(counted.split()[-1]),
    }


def _nothing(checkout: Path, home: Path, name: str, tracking: str) -> float:
    """Seconds of a run of three ops that do nothing, in a folder of its own."""
    folder = home / name
    folder.mkdir()
    (folder / "nothing_ops.py").write_text(OPS)
    (folder / "pipeline.toml").write_text(PIPELINE.format(tracking=tracking))
    return _seconds(checkout, folder, home, "run", "pipeline.toml", "--store", "runs")


def _doctor(checkout: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return {"doctor": _seconds(checkout, Path(folder), Path(folder), "doctor")}


def _smoke(checkout: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        file, store = checkout / "pipelines/vlm_dflash.toml", Path(folder) / "runs"
        command = ("run", str(file), "--smoke", "16", "--store", str(store))
        return {"smoke": _seconds(checkout, Path(folder), Path(folder), *command)}


MEASURES: dict[str, Callable[[Path], dict[str, float]]] = {"tracking": _tracking, "doctor": _doctor, "smoke": _smoke}


def _seconds(checkout: Path, folder: Path, home: Path, *arguments: str) -> float:
    """Wall-clock seconds of `dflow ARGUMENTS` by a checkout's code; home: where the user's cache and state lie.

    Raises RuntimeError with the end of its output if it fails. `doctor` fails where it finds something missing.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    own = {"PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(home / "cache"), "XDG_STATE_HOME": str(home / "state")}
    started = time.perf_counter()
    done = subprocess.run(
        (*DFLOW, *arguments), cwd=folder, env={**kept, **own}, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - started
    if done.returncode and arguments[0] != "doctor":
        raise RuntimeError(
            f"dflow {' '.join(arguments)}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return seconds


def _memory(store: Store) -> list[tuple[str, ...]]:
    """Per node of the store's latest run that needs memory: what is foreseen where its inputs exist, and its peak."""
    record = find_record(store.records, None)
    graph, nodes = record.graph(to_run=False), record.state.nodes
    made = {name: store.object_path(node.digest) for name, node in nodes.items() if node.digest is not None}
    rows = []
    for name, node in nodes.items():
        others = {other: path for other, path in made.items() if other != name}
        needed = graph_estimates(graph, others, free_disk=0).needs.get(name)
        foreseen = sum(needed.memory.values()) if needed is not None else 0
        if foreseen and node.memory:
            ratio = foreseen / node.memory
            cells = (f"{foreseen / 1e9:.2f} GB", f"{node.memory / 1e9:.2f} GB", f"{ratio:.2f}")
            rows.append((name, *cells, verdict(1 / WITHIN <= ratio <= WITHIN)))
    return rows


if __name__ == "__main__":
    main()
