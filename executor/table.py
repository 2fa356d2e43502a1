"""What a user sees of a run: a live table with progress bars on a terminal, plain lines elsewhere; then the results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dsl.graph import Graph
from dsl.resources import Resources
from dsl.sizes import shown_bytes
from executor.lines import print_lines
from executor.record import NodeState, RunState

PLAIN_PROGRESS_S = 10.0
METRICS_SHOWN = 4
STYLES = {"done": "green", "failed": "bold red", "running": "bold yellow", "pending": "dim"}


class Display:
    """Plain lines: for logs, pipes and CI. Warnings and errors go to stderr."""

    def __init__(self, state: RunState, console: Console) -> None:
        self._state = state
        self._console = console
        self._errors = Console(stderr=True)
        self._progress: dict[str, tuple[int, int]] = {}
        self._metrics: dict[str, dict[str, float]] = {}
        self._said_at = time.monotonic()

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def changed(self, node_id: str) -> None:
        """A node's state in the record is another one now."""
        node = self._state.nodes[node_id]
        self._said_at = time.monotonic()
        if node.state == "running":
            again = f" (attempt {node.attempt})" if node.attempt > 1 else ""
            resumed = ", goes on with earlier work" if node.cache == "resumed" else ""
            self._print(f"{node_id}: started{again}{resumed}: {node.reason}")
        elif node.state == "done" and node.cache == "hit":
            self._print(f"{node_id}: cached {_short(node.digest)}")
        elif node.state == "done":
            self._print(f"{node_id}: done in {_seconds(node)}{_listed(node.metrics)}")
        elif node.state == "pending":
            self._print(f"{node_id}: stopped after {_seconds(node)}")

    def show(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take in what the running stage reported."""
        for event in events:
            if event["kind"] == "progress":
                self._progress[event["node"]] = (event["done"], event["total"])
            elif event["kind"] == "metric":
                self._metrics.setdefault(event["node"], {}).update(event["metrics"])
        self._tick()

    def note(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        self._errors.print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True)

    def failure(self, node_id: str, error: str, tail: Sequence[str], log: Path, hint: str) -> None:
        """A failed node: its error, the last lines of its log, what to do and where the log is."""
        self._errors.print(_failure(node_id, error, tail, log, hint), markup=False, highlight=False, soft_wrap=True)

    def _tick(self) -> None:
        if time.monotonic() - self._said_at < PLAIN_PROGRESS_S:
            return
        self._said_at = time.monotonic()
        for node_id, node in self._state.nodes.items():
            if node.state == "running" and node_id in self._progress:
                done, total = self._progress[node_id]
                self._print(f"{node_id}: {done} of {total}{_listed(self._metrics.get(node_id, {}))}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay(Display):
    """A table that is drawn anew while the run goes on."""

    def __init__(self, state: RunState, console: Console) -> None:
        super().__init__(state, console)
        self._live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._draw)
        self._errors = console
        self._failures: list[str] = []

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        for text in self._failures:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def changed(self, node_id: str) -> None:
        """The table shows it by itself."""

    def failure(self, node_id: str, error: str, tail: Sequence[str], log: Path, hint: str) -> None:
        self._failures.append(_failure(node_id, error, tail, log, hint))

    def _tick(self) -> None:
        return

    def _draw(self) -> Table:
        return nodes_table(
            self._state, {node_id: self._bar(node_id, node) for node_id, node in self._state.nodes.items()}
        )

    def _bar(self, node_id: str, node: NodeState) -> Any:
        if node.state != "running":
            return ""
        done, total = self._progress.get(node_id, (0, 0))
        bar = ProgressBar(total=total or None, completed=done, width=32, pulse=not total)
        latest = self._metrics.get(node_id, {})
        both = Table.grid()
        both.add_row(bar)
        both.add_row(Text(_listed(latest).removeprefix(": "), style="dim"))
        return both


def make_display(state: RunState) -> Display:
    console = Console()
    return LiveDisplay(state, console) if console.is_terminal else Display(state, console)


def print_results(state: RunState, result_nodes: Sequence[str]) -> None:
    """The table of the nodes, and the final metrics and the warnings of those whose figures are the pipeline's."""
    console = Console()
    console.print(nodes_table(state))
    for node_id in result_nodes:
        node = state.nodes[node_id]
        if node.state != "done":
            continue
        if node.metrics:
            console.print(_results(node_id, node.metrics))
        for warning in node.warnings:
            print_lines(f"{node_id}: warning: {warning}")


def _results(node_id: str, metrics: Mapping[str, float]) -> Table:
    table = Table(title=f"results of {node_id}", title_justify="left", box=None, header_style="bold")
    table.add_column("metric", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("interval", no_wrap=True)
    for row in result_rows(metrics):
        table.add_row(*map(Text, row))
    return table


def result_rows(metrics: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """Name, value and interval of each metric, by name: `x_low` and `x_high` are the interval of `x`, and a numbered
    series such as `x_01`, `x_02`, ... is one row with its first and its last value.
    """
    rows = {}
    series: dict[str, list[str]] = {}
    for name in sorted(metrics):
        whole, _, end = name.rpartition("_")
        bounds = [metrics[bound] for bound in (f"{name}_low", f"{name}_high") if bound in metrics]
        if end.isdecimal():
            series.setdefault(whole, []).append(name)
        elif end not in ("low", "high") or not {whole, f"{whole}_low", f"{whole}_high"} <= metrics.keys():
            interval = f"[{_number(bounds[0])}, {_number(bounds[1])}]" if len(bounds) == 2 else ""
            rows[name] = (name, _number(metrics[name]), interval)
    for names in series.values():
        first, last = names[0], names[-1]
        if first == last:
            rows[first] = (first, _number(metrics[first]), "")
        else:
            shown = f"{first}..{last.rpartition('_')[2]}"
            rows[first] = (shown, f"{_number(metrics[first])} .. {_number(metrics[last])}", "")
    return [rows[name] for name in sorted(rows)]


def nodes_table(state: RunState, progress: Mapping[str, Any] | None = None) -> Table:
    """One row per node: state, where its artifact came from, seconds, digest, and its progress or else why it ran."""
    table = Table(title=f"{state.pipeline}, run {state.run}", title_justify="left", box=None, header_style="bold")
    for name in ("node", "state", "cache"):
        table.add_column(name)
    table.add_column("seconds", justify="right")
    table.add_column("digest")
    table.add_column("why" if progress is None else "progress", overflow="fold", min_width=16)
    for node_id, node in state.nodes.items():
        last = Text(node.error.splitlines()[0] if node.error else node.reason)
        shown = Text(node.state, style=STYLES[node.state])
        row = (node_id, shown, node.cache or "", _seconds(node), _short(node.digest))
        table.add_row(*row, last if progress is None else progress[node_id])
    return table


def print_plan(rows: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> None:
    """The plan: what is taken from the store, what runs and why, what may be cut off; and what is not there for it."""
    words = {"hit": "cached", "miss": "runs", "maybe": "may be cut off"}
    table = Table(box=None, header_style="bold")
    for name in ("node", "op", "plan", "digest", "why"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(row["id"], row["op"], words[row["cache"]], _short(row["digest"]), Text(row["reason"] or ""))
    Console().print(table)
    if missing:
        print_lines("\n".join(["", "not there, so that `dflow run` would refuse:", *missing]))


def print_resources(graph: Graph, needs: Mapping[str, Resources], free_disk: int, store: Path) -> None:
    """What the nodes need of memory and of the disk: a table of the sums, then the parts and what is to be said.

    Nothing is printed for a graph whose ops tell nothing. Memory is that of one rank.
    """
    table = Table(box=None, header_style="bold")
    table.add_column("node")
    for name in ("ranks", "memory each", "disk"):
        table.add_column(name, justify="right", no_wrap=True)
    details = []
    for node_id, need in needs.items():
        if need.memory or need.disk:
            table.add_row(node_id, str(graph.nodes[node_id].launch.nproc), _total(need.memory), _disk(need))
        for kind, parts in (("memory", need.memory), ("disk", need.disk)):
            if len(parts) > 1:
                details.append(f"{node_id}: {kind}: {_parts(parts)}")
        details += [f"{node_id}: {note}" for note in need.notes]
    if table.rows:
        Console().print("", table, sep="\n")
        print_lines(f"memory: of a GPU, or else of the machine; {shown_bytes(free_disk)} of disk are free at {store}")
    for line in details:
        print_lines(line)


def _total(parts: Mapping[str, int]) -> str:
    return shown_bytes(sum(parts.values())) if parts else ""


def _disk(need: Resources) -> str:
    return _total(need.disk) + (f" for {need.disk_per}" if need.disk_per else "")


def _parts(parts: Mapping[str, int]) -> str:
    """The largest first."""
    ordered = sorted(((size, name) for name, size in parts.items() if size), reverse=True)
    return ", ".join(f"{name} {shown_bytes(size)}" for size, name in ordered)


def _failure(node_id: str, error: str, tail: Sequence[str], log: Path, hint: str) -> str:
    """The error, the log's last lines where they say more than the error does, what to do, and where the log is."""
    more = tail if any(line.strip() not in error for line in tail) else ()
    return "\n".join(
        [f"{node_id} failed: {error}", *(f"    {line}" for line in more), f"what to do: {hint}", f"log: {log}"]
    )


def _short(digest: str | None) -> str:
    return digest[:12] if digest else ""


def _seconds(node: NodeState) -> str:
    if node.state == "running" and node.started is not None:
        return f"{time.time() - node.started:.0f} s"
    return "" if node.seconds is None else f"{node.seconds:.1f} s"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def _listed(metrics: Mapping[str, float]) -> str:
    shown = [f"{name} {_number(value)}" for name, value in list(metrics.items())[:METRICS_SHOWN]]
    return ": " + ", ".join(shown) if shown else ""
