"""Throughput of heavy stages of a pipeline on an idle machine and beside busy processes, against a fair share.

    python benchmarks/busy.py                     # target, capture, train and eval of pipelines/tiny.toml
    python benchmarks/busy.py --before OLDER      # also the same stages of an older checkout, without busy processes
    python benchmarks/busy.py --quick             # a few steps, one round, beside one process: a dry run

Throughput is the progress that a stage reports, over the time from its first report to its last, without a training's
first step, which compiles kernels. A round runs a stage quiet and beside each number of busy processes, in an order
that rotates from round to round. A busy process is a loop in Python; it ends with this script, at the latest after
LIMIT_S. Ratios are medians of the rounds' ratios.

With t threads, h busy processes and c cores, a stage gets a share of t / (t + h) of all cores, and uses
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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Rounds, in_rounds, median_ratio, parser, run_dflow, save_figures, table, verdict
from dsl.read_toml import read_graph

TINY = ROOT / "pipelines" / "tiny.toml"
SHARE = 0.4
SLOWER = 0.97  # of the throughput before
LIMIT_S = 900.0
SPIN = "import os, sys, time\nend = time.time() + float(sys.argv[1])\nparent = os.getppid()\n"
SPIN += "while time.time() < end and os.getppid() == parent:\n    sum(range(1000))\n"


@dataclass(frozen=True)
class Stage:
    """A node to measure. setting: a field of its key that hardly changes its work, so that another value runs it
    again. sizes: settings of the pipeline that give it enough work. skips: units of progress before the measurement.
    """

    setting: str
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
class Checkout:
    """A checkout of dflow, with a store of its own. settings: `-s` for every run, so that parent nodes are reused."""

    pipeline: Path
    root: Path
    store: Path
    settings: tuple[str, ...]

    def run(self, *options: str) -> None:
        settings = itertools.chain.from_iterable(("-s", setting) for setting in self.settings)
        run_dflow(self.root, "run", str(self.pipeline), "--store", str(self.store), *settings, *options)

    def measure(self, name: str, busy: int, numbers: Iterator[int]) -> dict[str, Any]:
        """Run a node again beside this many busy processes: its throughput and its threads."""
        stage = STAGES[name]
        with busy_processes(busy):
            self.run("--only", name, "-s", f"{stage.setting}={stage.first + next(numbers)}")
        record = max((self.store / "records").iterdir(), key=lambda folder: folder.name)
        events = [json.loads(line) for line in (record / "events.jsonl").read_text().splitlines()]
        own = [event for event in events if event["node"] == name]
        digest = next(event["digest"] for event in own if event.get("state") == "done")
        manifest = json.loads((self.store / "objects" / digest / "manifest.json").read_text())
        return {"throughput": throughput(own, stage.skips), "threads": manifest["launch"]["threads"]}


def settings_of(names: Sequence[str], *, quick: bool) -> tuple[str, ...]:
    """Settings that give the stages enough work, or almost none."""
    return tuple(setting for name in names for setting in (STAGES[name].quick if quick else STAGES[name].sizes))


def throughput(events: Sequence[dict[str, Any]], skips: int) -> float:
    """Units of progress a second, from the first series of reports, after `skips` units.

    Raises RuntimeError for too few reports.
    """
    series: list[tuple[float, int]] = []
    for event in events:
        if event["kind"] == "progress":
            if series and event["done"] < series[-1][1]:
                break
            series.append((event["time"], event["done"]))
    counted = [report for report in series if report[1] >= skips]
    if len(counted) < 2 or counted[0][0] >= counted[-1][0]:
        raise RuntimeError(f"too few reports for a throughput: {series}")
    return (counted[-1][1] - counted[0][1]) / (counted[-1][0] - counted[0][0])


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """This many processes in an endless loop, killed and reaped on exit."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN, str(LIMIT_S)]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def goal(threads: int, busy: int, cores: int) -> float:
    """The least throughput beside this many busy processes, as a share of the quiet one."""
    return SHARE * min(1.0, threads / (threads + busy) * cores / min(threads, cores))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Per stage and kind of run ("quiet", "before", "busy 4") the figures of its rounds."""
    settings = settings_of(options.stages, quick=options.quick)
    graph = read_graph(options.pipeline, settings)
    above = {parent for name in options.stages for parent in graph.nodes[name].parents}
    last = [name for name in above if above & graph.below(name) == {name}]
    now, *before = (
        Checkout(options.pipeline, root.resolve(), folder / name, settings)
        for name, root in (("now", ROOT), ("before", options.before))
        if root is not None
    )
    for checkout, node in itertools.product((now, *before), last):
        print(f"preparing {node} of {checkout.root}", flush=True)
        checkout.run("--to", node)
    numbers = itertools.count(1)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name in options.stages:
        quiet = {
            kind: partial(checkout.measure, name, 0, numbers)
            for kind, checkout in zip(("quiet", "before"), (now, *before), strict=False)
        }
        busy = {f"busy {count}": partial(now.measure, name, count, numbers) for count in options.busy}
        both = min(options.busy_rounds, options.rounds)
        found[name] = {kind: [] for kind in (*quiet, *busy)}
        for kinds, rounds in ((quiet | busy, both), (quiet, options.rounds - both)):
            outcomes = in_rounds(kinds, rounds, lambda figures: f"{figures['throughput']:.3g}/s", f"{name} ")
            for kind, each in outcomes.items():
                found[name][kind] += each
    return found


def rows_of(found: dict[str, dict[str, list[dict[str, Any]]]], busy: Sequence[int], cores: int) -> list[dict[str, Any]]:
    """A row for each stage and number of busy processes, and one against the older checkout, if any."""
    rows = []
    for name, kinds in found.items():
        rounds, threads = Rounds(kinds), kinds["quiet"][0]["threads"]
        quiet = rounds.values("quiet", "throughput")
        compared = []  # name of the row, kind of the throughput shown, ratio, goal
        for count in busy:
            if values := rounds.values(f"busy {count}", "throughput"):  # quiet rounds may be more than busy ones
                ratio = median_ratio(values, quiet[: len(values)])
                compared.append((f"{count} busy", f"busy {count}", ratio, goal(threads, count, cores)))
        if "before" in kinds:
            ratio = rounds.ratio("quiet", "before", "throughput")
            compared.append((f"before, {kinds['before'][0]['threads']} threads", "quiet", ratio, SLOWER))
        for beside, kind, ratio, least in compared:
            median = rounds.median(kind, "throughput")
            row = {"stage": name, "threads": threads, "beside": beside, "throughput": median}
            rows.append({**row, "of_quiet": ratio, "goal": least, "holds": ratio >= least})
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    arguments.add_argument("--pipeline", type=Path, default=TINY, help="another file with nodes of these names")
    arguments.add_argument("--busy", nargs="+", type=int, help="numbers of busy processes; default: 1 4")
    arguments.add_argument("--rounds", type=int, help="rounds on the quiet machine; default: 10")
    arguments.add_argument("--busy-rounds", type=int, default=3, help="rounds also beside busy processes; 0 for none")
    arguments.add_argument("--before", type=Path, help="an older checkout to compare the quiet throughput with")
    arguments.add_argument("--quick", action="store_true", help="a dry run: a few steps, one round, beside one process")
    options = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends what runs, as Ctrl-C does
    options.busy = options.busy or ([1] if options.quick else [1, 4])
    options.rounds = options.rounds or (1 if options.quick else 10)
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{cores} cores, load average {load:.1f} at the start: with more than 0.2 the machine is not quiet")
    start = time.time()
    with tempfile.TemporaryDirectory(prefix="dflow-busy-") as folder:
        found = measure(options, Path(folder))
    rows = rows_of(found, options.busy, cores)
    cells = [["stage", "threads", "beside", "per second", "of quiet, or of before", "goal", ""]]
    for row in rows:
        figures = [f"{row['throughput']:.3g}", f"{row['of_quiet']:.2f}", f">= {row['goal']:.2f}"]
        cells.append([row["stage"], str(row["threads"]), row["beside"], *figures, verdict(row["holds"])])
    print(f"\n{table(cells)}\n{time.time() - start:.0f} s")
    save_figures(options.json, {"cores": cores, "load": load, "quick": options.quick, "rows": rows, "rounds": found})


if __name__ == "__main__":
    main()
