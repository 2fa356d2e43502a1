"""dflow's executor beside doit and DVC: what runs cost in which little or nothing is to be done, and what comes of
changes, kills, two runs at once and mistakes.

    python benchmarks/execution.py
    python benchmarks/execution.py --peers-python PEERS/bin/python --rounds 9 --json figures.json

What each tool is given, and how it runs a node: benchmarks/sides/tools.py. Times are medians of rounds in which every
tool runs once, a ratio is the median of the rounds' ratios. A peer that is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.executor_costs import Cost, first_runs, further_runs
from benchmarks.executor_rows import (
    changed_value,
    edited_helper,
    killed_executor,
    killed_rebuild,
    several_mistakes,
    two_runs,
    what_would_run,
)
from benchmarks.rounds import table
from benchmarks.sides.tools import Tool, found_tools

NOOP_GOAL_S, LONG_GOAL_S, FIRST_GOAL_S = 0.30, 0.6, 10.0
# What the table calls a row, what looks at it, and what its cell should begin with for ours.
ROWS: dict[str, tuple[str, Callable[[Tool, Path, int], str], str]] = {
    "changed": (
        "value in the middle of 10 changed, nodes that ran: same output / other output / changed back",
        lambda tool, folder, _: changed_value(tool, folder),
        "1 / 5 / 0",
    ),
    "helper": (
        "nodes of 10 that ran: helper function edited / only a comment edited",
        lambda tool, folder, _: edited_helper(tool, folder),
        "10 / 0",
    ),
    "killed-rebuild": ("kill -9 at the half of a rebuild, then the input put back", killed_rebuild, "the whole file"),
    "killed-executor": ("kill -9 of the executor alone", killed_executor, "the node dies with it, never"),
    "two-runs": (
        "two runs at once: how often each of 3 nodes ran",
        lambda tool, folder, _: two_runs(tool, folder),
        "1x, 1x, 1x; exit codes 0 and 0",
    ),
    "mistakes": (
        "three mistakes in a file, told at once",
        lambda tool, folder, _: several_mistakes(tool, folder),
        "3 of 3, 3 with",
    ),
    "dry-run": (
        "dry run after a change: of the node, of the one below",
        lambda tool, folder, _: what_would_run(tool, folder),
        "runs, may be",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", type=Path, help="the Python that has doit and DVC; this one unless given")
    parser.add_argument("--rounds", type=int, default=9, help="of runs in which nothing is to be done")
    parser.add_argument("--first-rounds", type=int, default=3, help="of first runs")
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--long", type=int, default=1000, help="nodes of the long chain; 0: leave it out")
    parser.add_argument(
        "--longest", type=int, default=10000, help="nodes of the chain that is only read; 0: leave it out"
    )
    parser.add_argument("--long-tools", nargs="*", default=["ours", "doit"], help="who gets the long chains")
    parser.add_argument("--megabytes", type=int, default=100, help="of the file whose rebuild is killed")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS, help="what is looked at beside times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    options = parser.parse_args(argv)
    tools, missing = found_tools(options.peers_python)
    for line in missing:
        print(line)
    with tempfile.TemporaryDirectory() as folder:
        costs = _costs(tools, Path(folder), options)
        rows = _rows(tools, Path(folder), options)
    print(_report(tools, costs, rows))
    if options.json:
        told = {name: {**cost.rounds.figures, "failed": cost.failed} for name, (cost, _) in costs.items()}
        rows_told = {name: cells for name, (cells, _) in rows.items()}
        options.json.write_text(json.dumps({"costs": told, "rows": rows_told}, indent=2) + "\n")
    return 0


def _costs(tools: Sequence[Tool], top: Path, options: argparse.Namespace) -> dict[str, tuple[Cost, float]]:
    """By row: the seconds, and the goal for ours; infinite where there is none."""
    long = [tool for tool in tools if tool.name in options.long_tools]
    first = first_runs(tools, top / "short", options.nodes, options.first_rounds)
    found = {
        f"no-op run, {options.nodes} nodes": (
            further_runs(tools, top / "short", options.rounds, lambda tool: tool.run),
            NOOP_GOAL_S,
        )
    }
    if options.long:
        first_runs(long, top / "long", options.long, 1)
        noop = further_runs(long, top / "long", options.rounds, lambda tool: tool.run)
        found[f"no-op run, chain of {options.long}"] = (noop, LONG_GOAL_S)
    if options.longest:
        for tool in long:
            folder = top / "longest" / tool.name / "0"
            folder.parent.mkdir(parents=True)
            tool.make(folder)
            tool.write_chain(folder, [f"v{node}" for node in range(options.longest)])
        read = further_runs(long, top / "longest", min(options.rounds, 3), lambda tool: tool.dry)
        found[f"dry run, chain of {options.longest}"] = (read, float("inf"))
    return {**found, f"first run, {options.nodes} nodes": (first, FIRST_GOAL_S)}


def _rows(tools: Sequence[Tool], top: Path, options: argparse.Namespace) -> dict[str, tuple[dict[str, str], str]]:
    """By row: the tools' cells, and what ours should begin with."""
    found = {}
    for name in options.rows:
        title, row, wanted = ROWS[name]
        cells = {}
        for tool in tools:
            cells[tool.name] = row(tool, top / f"{name}-{tool.name}", options.megabytes)
            print(f"  {title}, {tool.name}: {cells[tool.name]}", flush=True)
        found[title] = (cells, wanted)
    return found


def _report(
    tools: Sequence[Tool],
    costs: dict[str, tuple[Cost, float]],
    rows: dict[str, tuple[dict[str, str], str]],
) -> str:
    peers = [tool.name for tool in tools if tool.name != "ours"]
    lines = [["", "goal", "", "ours", *peers, *(f"ours / {peer}" for peer in peers)]]
    for name, (cost, goal) in costs.items():
        has_goal = goal != float("inf")
        holds = "ours" in cost.rounds.figures and cost.rounds.median("ours", "wall") <= goal
        wanted = f"<= {goal:.2f} s" if has_goal else "ends"
        cells = [cost.cell(tool) for tool in ("ours", *peers)]
        lines.append([name, wanted, _holds(holds), *cells, *(cost.ratio(peer) for peer in peers)])
    for name, (found, wanted) in rows.items():
        cells = [found[tool] for tool in ("ours", *peers)]
        lines.append([name, wanted, _holds(found["ours"].startswith(wanted)), *cells, *("" for _ in peers)])
    return f"Wall and CPU seconds, medians\n{table(lines)}"


def _holds(holds: bool) -> str:
    return "holds" if holds else "missed"


if __name__ == "__main__":
    sys.exit(main())
