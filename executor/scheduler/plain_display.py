"""The output of a run in progress: plain lines for logs, pipes and CI; for terminals see rich_display.py."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from dsl.finding import Finding, block, for_run
from executor.records.events import Event
from executor.records.run_record import RunState
from executor.results.run_table import Live, shown_metrics, shown_seconds
from executor.system.output import UNCHANGED_S, Unrepeated, print_lines, shown_digest

PLAIN_PROGRESS_S = 10.0
NOTHING_YET = "no progress yet; libraries such as torch and transformers, and models, are loaded first"
CACHED_SHOWN = 20


class Display:
    """The plain display of a run, in lines. Warnings and errors go to stderr. Several nodes may run at once."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._live: defaultdict[str, Live] = defaultdict(Live)
        self._shown_at = time.monotonic()
        self._lines: defaultdict[str, Unrepeated] = defaultdict(Unrepeated)  # of progress, by node
        self._waits: dict[tuple[str, str], float] = {}  # when it was said, by node and reason
        self.warned: set[str] = set()  # texts of stages' warnings that were printed
        self.last: list[str] = []  # printed after the results
        self._done_before = {node_id for node_id, node in state.nodes.items() if node.state == "done"}
        self._shown_together = self._done_before if len(self._done_before) > CACHED_SHOWN else set()

    def __enter__(self) -> Display:
        if self._shown_together:
            self.note(f"{len(self._shown_together)} of {len(self._state.nodes)} nodes are {self._word()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def _word(self) -> str:
        """A word for nodes that were done before the run began."""
        is_all_cached = all(self._state.nodes[node_id].cache == "hit" for node_id in self._done_before)
        return "cached" if is_all_cached else "done before or cached"

    def changed(self, node_id: str) -> None:
        """Show that a node's state in the record has changed."""
        node = self._state.nodes[node_id]
        self._shown_at = time.monotonic()
        if node.state == "running":
            again = f" (attempt {node.attempt})" if node.attempt > 1 else ""
            resumed = ", continues earlier work" if node.cache == "resumed" else ""
            self.note(f"{node_id}: started{again}{resumed}: {node.reason}")
        elif node_id in self._shown_together:
            return
        elif node.state == "done" and node.cache == "hit":
            self.note(f"{node_id}: cached {shown_digest(node.digest)}")
        elif node.state == "done" and node_id in self._done_before:
            self.note(f"{node_id}: done before {shown_digest(node.digest)}")
        elif node.state == "done":
            self.note(f"{node_id}: done in {shown_seconds(node)}{_metrics_suffix(node.metrics)}")
        elif node.state == "pending":
            self.note(f"{node_id}: stopped after {shown_seconds(node)}")

    def show(self, events: Iterable[Event]) -> None:
        """Show what the running stages reported. Of the metrics, only the newest event's are shown."""
        for event in events:
            if event.node in self._state.nodes:
                self._live[event.node].add(event)
        self._tick()

    def note(self, text: str) -> None:
        self._print(text)

    def waits(self, node_id: str, reason: str, text: str) -> None:
        """Show what a node waits for, once for each reason, and again every five minutes. text: follows "waiting"."""
        said = self._waits.get((node_id, reason))
        if said is None or time.monotonic() - said >= UNCHANGED_S:
            self._waits[node_id, reason] = time.monotonic()
            self.note(f"{node_id}: waiting{text}")

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}", error=True)

    def warn_of(self, node_id: str, text: str) -> None:
        """Show a stage's warning. A text is shown once, even if several stages send it: the results name them all."""
        if text not in self.warned:
            self.warned.add(text)
            self.note(f"{node_id}: warning: {for_run(text, self._state.run)}")

    def say_last(self, text: str) -> None:
        """Print a text after the results."""
        self.last.append(text)

    def failure(self, found: Finding, tail: Sequence[str], log: Path) -> None:
        """Show why a node failed, the last lines of its log, what to do and where the log is."""
        self._print(failure_text(found, self._state.run, tail, log), error=True)

    def _print(self, text: str, *, error: bool = False) -> None:
        print_lines(text, error=error)

    def _tick(self) -> None:
        if time.monotonic() - self._shown_at < PLAIN_PROGRESS_S:
            return
        self._shown_at = time.monotonic()
        for node_id, node in self._state.nodes.items():
            live = self._live[node_id]
            said = str(live) if live.done is not None else NOTHING_YET
            if node.state == "running" and (line := self._lines[node_id].line(f"{node_id}: {said}")):
                self.note(line)


def make_display(state: RunState) -> Display:
    if not sys.stdout.isatty():
        return Display(state)
    from executor.scheduler.rich_display import LiveDisplay  # loads rich

    return LiveDisplay(state)


def failure_text(found: Finding, run: str, tail: Sequence[str], log: Path) -> str:
    """The text of a failure: the finding, the log's last lines if they say more, advice, and the path of the log."""
    more = tail if any(each.strip() not in found.what for each in tail) else ()
    return f"{block(found, run, below=more)}\n  log: {log}"


def _metrics_suffix(metrics: Mapping[str, float]) -> str:
    return f": {shown_metrics(metrics)}" if metrics else ""
