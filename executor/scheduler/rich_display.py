"""The output of a run in progress on a terminal: a table with progress bars, redrawn as nodes change."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import IO, cast

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from executor.records.run_record import NodeState, RunState
from executor.results.run_table import NODE_COLUMNS, node_cells
from executor.scheduler.plain_display import Display
from executor.system.output import Enduring, as_typed, printable

STYLES = {"done": "green", "failed": "bold red", "running": "bold yellow", "pending": "dim"}
LINES_BESIDE = 4  # the title, the header, the caption, and the line of the cursor


class LiveDisplay(Display):
    """A live table of as many nodes as fit the terminal, running and failed ones first; other output goes above it."""

    def __init__(self, state: RunState, console: Console | None = None) -> None:
        super().__init__(state)
        self._console = console or Console(file=cast(IO[str], Enduring(sys.stdout)))
        self._drawn = Live(console=self._console, refresh_per_second=4, transient=True, get_renderable=self._draw)

    def __enter__(self) -> LiveDisplay:
        self._drawn.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drawn.stop()

    def changed(self, node_id: str) -> None:
        """Do nothing: the table on the terminal is redrawn regularly."""

    def _print(self, text: str, *, error: bool = False) -> None:
        self._console.print(as_typed(printable(text)), markup=False, highlight=False, soft_wrap=True)

    def _tick(self) -> None:
        return

    def _draw(self) -> Table:
        title = f"{self._state.pipeline}, run {self._state.run}"
        table = Table(title=title, title_justify="left", box=None, header_style="bold")
        for name in NODE_COLUMNS:
            table.add_column(name, justify="right" if name == "seconds" else "left")
        table.add_column("progress", min_width=16)
        shown = shown_nodes(self._state, self._console.height - LINES_BESIDE)
        for node_id in shown:
            node = self._state.nodes[node_id]
            name, state, *others = node_cells(node_id, node)
            table.add_row(name, Text(state, style=STYLES[node.state]), *others, self._bar(node_id, node))
        if len(shown) < len(self._state.nodes):
            table.caption = _caption(self._state, shown)
            table.caption_justify = "left"
        return table

    def _bar(self, node_id: str, node: NodeState) -> Table | str:
        if node.state != "running":
            return ""
        live = self._live[node_id]
        beside = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=live.total or None, completed=live.done or 0, width=20, pulse=not live.total)
        beside.add_row(bar, Text(str(live), style="dim"))
        return beside


def shown_nodes(state: RunState, limit: int) -> list[str]:
    """The nodes to show, at most `limit`, in the order of the graph: running and failed ones, then the
    latest to end.
    """
    if len(state.nodes) <= limit:
        return list(state.nodes)

    def rank(node_id: str) -> tuple[int, float]:
        node = state.nodes[node_id]
        if node.state in ("running", "failed"):
            return (0, 0.0)
        return (1, -(node.ended or 0.0)) if node.ended is not None else (2, 0.0)

    unfinished = [node_id for node_id, node in state.nodes.items() if node.state != "done" or node.ended is not None]
    first = set(sorted(unfinished, key=rank)[: max(limit, 1)])
    return [node_id for node_id in state.nodes if node_id in first]


def _caption(state: RunState, shown: Sequence[str]) -> str:
    hidden = Counter(node.state for node_id, node in state.nodes.items() if node_id not in set(shown))
    return "and " + ", ".join(f"{number} {name}" for name, number in sorted(hidden.items()))
