"""The rows of benchmarks/execution.py that say how long a tool takes: rounds in which every tool runs once."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rounds import Setting
from benchmarks.sides.tools import Tool, environment


@dataclass(frozen=True)
class Cost:
    """The seconds of a row, one mapping a round and a tool, and why a tool has none."""

    rounds: Setting = field(default_factory=lambda: Setting(0, 0))
    failed: dict[str, str] = field(default_factory=dict)

    def cell(self, tool: str) -> str:
        if tool in self.failed:
            return self.failed[tool]
        if tool not in self.rounds.figures:
            return "-"
        return f"{self.rounds.median(tool, 'wall'):.2f} s, {self.rounds.median(tool, 'cpu'):.2f} s CPU"

    def ratio(self, tool: str) -> str:
        """Ours over another's wall time."""
        return f"{self.rounds.ratio('ours', tool, 'wall'):.2g}x" if tool in self.rounds.figures else "-"

    def add(self, tool: Tool, folder: Path, arguments: Sequence[str]) -> None:
        if tool.name in self.failed:
            return
        try:
            self.rounds.figures.setdefault(tool.name, []).append(_measured(tool, folder, arguments))
        except RuntimeError as error:
            self.failed[tool.name] = str(error)
            self.rounds.figures.pop(tool.name, None)


def first_runs(tools: Sequence[Tool], top: Path, nodes: int, rounds: int) -> Cost:
    """A fresh folder each time; that of the last round stays for the runs that follow."""
    cost = Cost()
    for index in range(rounds):
        for tool in _turned(tools, index):
            folder = top / tool.name / str(index)
            folder.parent.mkdir(parents=True, exist_ok=True)
            tool.make(folder)
            tool.write_chain(folder, [f"v{node}" for node in range(nodes)])
            cost.add(tool, folder, tool.run)
            print(
                f"  first run of {nodes}, round {index + 1}/{rounds}, {tool.name}: {cost.cell(tool.name)}", flush=True
            )
    return cost


def further_runs(tools: Sequence[Tool], top: Path, rounds: int, arguments: Callable[[Tool], Sequence[str]]) -> Cost:
    """The same command again and again, in the folder of the last first run."""
    cost = Cost()
    folders = {tool.name: max((top / tool.name).iterdir(), key=lambda folder: int(folder.name)) for tool in tools}
    for index in range(rounds):
        for tool in _turned(tools, index):
            cost.add(tool, folders[tool.name], arguments(tool))
    return cost


def _turned(tools: Sequence[Tool], index: int) -> Sequence[Tool]:
    start = index % len(tools)
    return [*tools[start:], *tools[:start]]


def _measured(tool: Tool, folder: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Wall and CPU seconds, those of its children included. Raises RuntimeError, with the class of an exception."""
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
        said = output.read_text()
        raise RuntimeError("RecursionError" if "recursion" in said.lower() else f"fails: {said.strip()[-200:]}")
    return {"wall": wall, "cpu": used.ru_utime + used.ru_stime}
