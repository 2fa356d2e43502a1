"""dflow's executor compared with doit and DVC: the cost of runs with little or nothing to do, and the effects of
changes, kills, two runs at once and mistakes.

    python benchmarks/execution.py
    python benchmarks/execution.py --peers-python PEERS/bin/python --rounds 9 --json figures.json

How each tool is set up, and how it runs a node: benchmarks/sides/tools.py. Times are medians of rounds in which every
tool runs once, a ratio is the median of the rounds' ratios. A peer that is not installed is omitted.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.executor_rows import (
    changed_value,
    edited_helper,
    killed_executor,
    killed_rebuild,
    several_mistakes,
    two_runs,
    what_would_run,
)
from benchmarks.harness import Rounds, in_rounds, parser, save_figures, table, verdict
from benchmarks.sides.tools import Tool, environment, found_tools

NOOP_GOAL_S, LONG_GOAL_S = 0.30, 0.6
# A row's title, the function for a tool's cell, and the expected beginning of dflow's cell.
ROWS: dict[str, tuple[str, Callable[[Tool, Path, int], str], str]] = {
    "changed": (
        "value in the middle of 10 changed, nodes that ran: same output / other output / changed back",
        changed_value,
        "1 / 5 / 0",
    ),
    "helper": ("nodes of 10 that ran: helper function edited / only a comment edited", edited_helper, "10 / 0"),
    "killed-rebuild": ("kill -9 halfway through a rebuild, then the input restored", killed_rebuild, "the whole file"),
    "killed-executor": ("kill -9 of only the executor", killed_executor, "the node dies with it, never"),
    "two-runs": ("two runs at once: how often each of 3 nodes ran", two_runs, "1x, 1x, 1x; exit codes 0 and 0"),
    "mistakes": ("three mistakes in a file, reported at once", several_mistakes, "3 of 3, 3 with"),
    "dry-run": ("dry run after a change: of the node, of the one below", what_would_run, "runs, may be"),
}


@dataclass(frozen=True)
class Cost:
    """The seconds of a row, why a tool has none, and the goal for dflow."""

    rounds: Rounds
    failed: dict[str, str]
    goal: float | None

    def cells(self, peers: Sequence[str]) -> list[str]:
        """The goal, whether it holds, seconds of every tool, and dflow's over each peer's."""
        ran = self.rounds.figures
        holds = "ours" in ran and self.goal is not None and self.rounds.median("ours", "wall") <= self.goal
        wanted = "ends" if self.goal is None else f"<= {self.goal:.2f} s"
        ratios = [f"{self.rounds.ratio('ours', peer, 'wall'):.2g}x" if peer in ran else "-" for peer in peers]
        return [wanted, verdict(holds), *(self._seconds(tool) for tool in ("ours", *peers)), *ratios]

    def _seconds(self, tool: str) -> str:
        if tool not in self.rounds.figures:
            return self.failed.get(tool, "-")
        return f"{self.rounds.median(tool, 'wall'):.2f} s, {self.rounds.median(tool, 'cpu'):.2f} s CPU"


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    tools, missing = found_tools(options.peers_python)
    for line in missing:
        print(line)
    with tempfile.TemporaryDirectory() as folder:
        costs = _costs(tools, Path(folder), options)
        rows = {ROWS[name][0]: _cells(tools, Path(folder), name, options.megabytes) for name in options.rows}
    peers = [tool.name for tool in tools if tool.name != "ours"]
    lines = [["", "goal", "", "ours", *peers, *(f"ours / {peer}" for peer in peers)]]
    lines += [[name, *cost.cells(peers)] for name, cost in costs.items()]
    for title, _, wanted in (ROWS[name] for name in options.rows):
        holds = verdict(rows[title]["ours"].startswith(wanted))
        lines.append([title, wanted, holds, *rows[title].values(), *("" for _ in peers)])
    print(f"Wall and CPU seconds, medians\n{table(lines)}")
    seconds = {name: {**cost.rounds.figures, "failed": cost.failed} for name, cost in costs.items()}
    save_figures(options.json, {"costs": seconds, "rows": rows})
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__, rounds=9)
    options.add_argument("--peers-python", type=Path, help="the Python that has doit and DVC; default: this one")
    options.add_argument("--first-rounds", type=int, default=3, help="rounds of first runs; default: %(default)s")
    options.add_argument("--nodes", type=int, default=100)
    options.add_argument("--long", type=int, default=1000, help="nodes of the long chain; 0: no such chain")
    options.add_argument("--longest", type=int, default=10000, help="nodes of the chain that is only read; 0: no chain")
    options.add_argument("--long-tools", nargs="*", default=["ours", "doit"], help="the tools that get the long chains")
    options.add_argument("--megabytes", type=int, default=100, help="size of the file whose rebuild is killed")
    options.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS, help="what is tested beside times")
    return options.parse_args(argv)


def _costs(tools: Sequence[Tool], top: Path, options: argparse.Namespace) -> dict[str, Cost]:
    """Seconds by row."""
    long = [tool for tool in tools if tool.name in options.long_tools]
    first, folders = _first_runs(tools, top / "short", options.nodes, options.first_rounds)
    found = {f"no-op run, {options.nodes} nodes": _further_runs(tools, folders, options.rounds, "run", NOOP_GOAL_S)}
    if options.long:
        _, folders = _first_runs(long, top / "long", options.long, 1)
        noop = _further_runs(long, folders, options.rounds, "run", LONG_GOAL_S)
        found[f"no-op run, chain of {options.long}"] = noop
    if options.longest:
        folders = {tool.name: _chain(tool, top / "longest" / tool.name, options.longest) for tool in long}
        dry = _further_runs(long, folders, min(options.rounds, 3), "dry", None)
        found[f"dry run, chain of {options.longest}"] = dry
    return {**found, f"first run, {options.nodes} nodes": first}


def _first_runs(tools: Sequence[Tool], top: Path, nodes: int, rounds: int) -> tuple[Cost, dict[str, Path]]:
    """A fresh folder for each run; those of the last round are returned for the runs that follow."""
    folders: dict[str, Path] = {}
    number = itertools.count()

    def first(tool: Tool) -> dict[str, Any]:
        folders[tool.name] = _chain(tool, top / f"{tool.name}-{next(number)}", nodes)
        return _measured(tool, folders[tool.name], tool.run)

    runs = {tool.name: partial(first, tool) for tool in tools}
    return _cost(runs, rounds, None, f"first run of {nodes}, "), folders


def _chain(tool: Tool, folder: Path, nodes: int) -> Path:
    tool.make(folder)
    tool.write_chain(folder, [f"v{node}" for node in range(nodes)])
    return folder


def _further_runs(
    tools: Sequence[Tool], folders: Mapping[str, Path], rounds: int, command: str, goal: float | None
) -> Cost:
    """The same command repeatedly, in the folder of the last first run."""
    runs = {tool.name: partial(_measured, tool, folders[tool.name], getattr(tool, command)) for tool in tools}
    return _cost(runs, rounds, goal)


def _cost(
    runs: Mapping[str, Callable[[], dict[str, Any]]], rounds: int, goal: float | None, title: str | None = None
) -> Cost:
    """The seconds of all rounds; a tool that fails is not run again. title: of each line that is printed."""
    failed: dict[str, str] = {}

    def run(name: str) -> dict[str, Any]:
        if name not in failed:
            try:
                return runs[name]()
            except RuntimeError as error:
                failed[name] = str(error)
        return {}

    def shown(seconds: dict[str, Any]) -> str:
        return f"{seconds['wall']:.2f} s" if seconds else "failed"

    found = in_rounds({name: partial(run, name) for name in runs}, rounds, shown if title else None, title or "")
    return Cost(Rounds({name: each for name, each in found.items() if name not in failed}), failed, goal)


def _measured(tool: Tool, folder: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Wall and CPU seconds, those of its children included. Raises RuntimeError with the end of its output."""
    output = folder / "output.txt"
    with output.open("wb") as file:
        started = time.perf_counter()
        process = subprocess.Popen(
            [str(tool.python), *arguments], cwd=folder, env=environment(), stdout=file, stderr=subprocess.STDOUT
        )
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        printed = output.read_text()
        raise RuntimeError("RecursionError" if "recursion" in printed.lower() else f"fails: {printed.strip()[-200:]}")
    return {"wall": wall, "cpu": used.ru_utime + used.ru_stime}


def _cells(tools: Sequence[Tool], top: Path, name: str, megabytes: int) -> dict[str, str]:
    """The row's cell of every tool."""
    title, cell, _ = ROWS[name]
    found = {}
    for tool in tools:
        found[tool.name] = cell(tool, top / f"{name}-{tool.name}", megabytes)
        print(f"  {title}, {tool.name}: {found[tool.name]}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
