"""Heavy stages of a pipeline on a quiet machine and beside busy processes: throughput, against a fair share of it.

    python benchmarks/busy.py                     # target, capture, train and eval of pipelines/tiny.toml
    python benchmarks/busy.py --before OLDER      # and, quiet, the same stages of an older checkout of dflow
    python benchmarks/busy.py --quick             # a few steps, one round, beside one process: a dry run

Throughput is what a stage says of its progress, over the time from its first report to its last; a training's first
step is left out, which compiles kernels. A round runs every stage quiet and beside each number of busy processes, in an
order that turns from round to round. A busy process is a loop in Python; it ends with this script, at the latest after
LIMIT_S. Ratios are medians of the rounds' ratios.

With t threads, h busy processes and c cores, a stage gets a share of t / (t + h) of all cores, and makes use of
min(t, c) of them. The goal is 0.4 of the throughput that this share gives:

    0.4 * quiet * min(1, t / (t + h) * c / min(t, c))
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rounds import ROOT, table
from dsl.read_toml import read_graph

TINY = ROOT / "pipelines" / "tiny.toml"
SHARE = 0.4
SLOWER = 0.97  # of the throughput before
LIMIT_S = 900.0
SPIN = "import os, sys, time\nend = time.time() + float(sys.argv[1])\nparent = os.getppid()\n"
SPIN += "while time.time() < end and os.getppid() == parent:\n    sum(range(1000))\n"
DFLOW = "import sys; from executor.cli import main; sys.exit(main())"


@dataclass(frozen=True)
class Stage:
    """A node that is measured. anew: a setting in its key that changes its work little or not at all: another value
    makes it run again. sizes: settings of the whole pipeline that give it enough to do.
    """

    anew: str
    first: int
    sizes: tuple[str, ...]
    quick: tuple[str, ...]
    skips: int = 0


STAGES = {
    "target": Stage("target.seed", 1, ("target.steps=40",), ("target.steps=4",), skips=1),
    "capture": Stage("capture.shard_tokens", 20_000, ("ingest.max_samples=256",), ("ingest.max_samples=32",)),
    "train": Stage("train.seed", 1, ("shard.tokens_per_step=1024", "shard.epochs=2"), ("shard.epochs=1",), skips=1),
    "eval": Stage("eval.seed", 1, ("eval.max_prompts=8",), ("eval.max_new_tokens=4",)),
}


@dataclass(frozen=True)
class Side:
    """A checkout of dflow, with a store of its own. settings: `-s` for every run, so that nodes above are reused."""

    pipeline: Path
    checkout: Path
    store: Path
    settings: tuple[str, ...]

    def run(self, *options: str) -> None:
        """`dflow run` of the pipeline. Raises RuntimeError with the end of its output where it fails."""
        settings = itertools.chain.from_iterable(("-s", setting) for setting in self.settings)
        command = [sys.executable, "-c", DFLOW, "run", str(self.pipeline), "--store", str(self.store)]
        done = subprocess.run(
            [*command, *settings, *options],
            cwd=self.checkout,
            env={**os.environ, "PYTHONPATH": str(self.checkout), "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"dflow run failed in {self.checkout}:\n{(done.stdout + done.stderr)[-3000:]}")

    def measure(self, name: str, number: int, busy: int) -> dict[str, Any]:
        """Run a node once more beside so many busy processes: its throughput and its threads."""
        stage = STAGES[name]
        with busy_processes(busy):
            self.run("--only", name, "-s", f"{stage.anew}={stage.first + number}")
        record = max((self.store / "records").iterdir(), key=lambda folder: folder.name)
        events = [json.loads(line) for line in (record / "events.jsonl").read_text().splitlines()]
        own = [event for event in events if event["node"] == name]
        digest = next(event["digest"] for event in own if event.get("state") == "done")
        manifest = json.loads((self.store / "objects" / digest / "manifest.json").read_text())
        return {"throughput": throughput(own, stage.skips), "threads": manifest["launch"]["threads"]}


def settings_of(names: Sequence[str], *, quick: bool) -> tuple[str, ...]:
    """What gives the stages enough to do, or next to nothing."""
    return tuple(setting for name in names for setting in (STAGES[name].quick if quick else STAGES[name].sizes))


def throughput(events: Sequence[dict[str, Any]], skips: int) -> float:
    """Units of progress a second, from the first series of reports: from its beginning, or the first one behind skips.

    Raises RuntimeError where there are too few reports.
    """
    series: list[tuple[float, int]] = []
    for event in events:
        if event["kind"] == "progress":
            if series and event["done"] < series[-1][1]:
                break
            series.append((event["time"], event["done"]))
    counted = [report for report in series if report[1] >= skips]
    if len(counted) < 2 or counted[0][0] >= counted[-1][0]:
        raise RuntimeError(f"too few reports to tell a throughput: {series}")
    return (counted[-1][1] - counted[0][1]) / (counted[-1][0] - counted[0][0])


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that compute without end, ended and reaped on leaving."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN, str(LIMIT_S)]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def goal(threads: int, busy: int, cores: int) -> float:
    """The least share of the quiet throughput beside so many busy processes."""
    return SHARE * min(1.0, threads / (threads + busy) * cores / min(threads, cores))


def ratios(above: Sequence[dict[str, Any]], below: Sequence[dict[str, Any]]) -> float:
    """Median of the rounds' ratios."""
    pairs = zip(above, below, strict=False)  # quiet rounds may be more than busy ones
    return statistics.median(one["throughput"] / other["throughput"] for one, other in pairs)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Per stage and kind of run ("quiet", "before", "busy 4") what its rounds gave."""
    settings = settings_of(options.stages, quick=options.quick)
    graph = read_graph(options.pipeline, settings)
    above = {parent for name in options.stages for parent in graph.nodes[name].parents}
    last = [name for name in above if above & graph.below(name) == {name}]
    checkouts = {"now": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    sides = {name: Side(options.pipeline, path, folder / name, settings) for name, path in checkouts.items()}
    for side, node in itertools.product(sides.values(), last):
        print(f"preparing {node} of {side.checkout}", flush=True)
        side.run("--to", node)
    numbers = itertools.count(1)
    found: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for index in range(options.rounds):
        kinds = [("quiet", "now", 0)] + [("before", "before", 0)] * ("before" in sides)
        if index < options.busy_rounds:
            kinds += [(f"busy {count}", "now", count) for count in options.busy]
        start = index % len(kinds)
        for name in options.stages:
            for kind, side, busy in (*kinds[start:], *kinds[:start]):
                outcome = sides[side].measure(name, next(numbers), busy)
                found[name][kind].append(outcome)
                print(f"  round {index + 1} {name}, {kind}: {outcome['throughput']:.3g}/s", flush=True)
    return found


def rows_of(found: dict[str, dict[str, list[dict[str, Any]]]], busy: Sequence[int], cores: int) -> list[dict[str, Any]]:
    """A row for each stage and number of busy processes, and one against the checkout before where there is one."""
    rows = []
    for name, kinds in found.items():
        threads, median = kinds["quiet"][0]["threads"], statistics.median
        for count in busy:
            if not (rounds := kinds[f"busy {count}"]):
                continue
            rows.append(
                {
                    "stage": name,
                    "threads": threads,
                    "beside": f"{count} busy",
                    "throughput": median(outcome["throughput"] for outcome in rounds),
                    "of_quiet": ratios(rounds, kinds["quiet"]),
                    "goal": goal(threads, count, cores),
                }
            )
        if "before" in kinds:
            rows.append(
                {
                    "stage": name,
                    "threads": threads,
                    "beside": f"before, {kinds['before'][0]['threads']} threads",
                    "throughput": median(outcome["throughput"] for outcome in kinds["quiet"]),
                    "of_quiet": ratios(kinds["quiet"], kinds["before"]),
                    "goal": SLOWER,
                }
            )
    return [{**row, "holds": row["of_quiet"] >= row["goal"]} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--pipeline", type=Path, default=TINY, help="another file with nodes of these names")
    parser.add_argument("--busy", nargs="+", type=int, help="numbers of busy processes; 1 and 4 unless given")
    parser.add_argument("--rounds", type=int, help="rounds on the quiet machine; 10 unless given")
    parser.add_argument(
        "--busy-rounds", type=int, default=3, help="how many of them are also beside busy processes; 0 for none"
    )
    parser.add_argument("--before", type=Path, help="an older checkout of dflow to compare the quiet throughput with")
    parser.add_argument("--quick", action="store_true", help="a few steps, one round, beside one process: a dry run")
    parser.add_argument("--json", type=Path, help="write every figure there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends what runs, as Ctrl-C does
    options.busy = options.busy or ([1] if options.quick else [1, 4])
    options.rounds = options.rounds or (1 if options.quick else 10)
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{cores} cores, load average {load:.1f} at the start: with more than 0.2 the machine is not quiet")
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="dflow-busy-") as folder:
        found = measure(options, Path(folder))
    rows = rows_of(found, options.busy, cores)
    head = ["stage", "threads", "beside", "per second", "of quiet, or of before", "goal", ""]
    cells = [
        [
            row["stage"],
            str(row["threads"]),
            row["beside"],
            f"{row['throughput']:.3g}",
            f"{row['of_quiet']:.2f}",
            f">= {row['goal']:.2f}",
            "holds" if row["holds"] else "missed",
        ]
        for row in rows
    ]
    print(f"\n{table([head, *cells])}\n{time.time() - began:.0f} s")
    if options.json:
        figures = {"cores": cores, "load": load, "quick": options.quick, "rows": rows, "rounds": found}
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
