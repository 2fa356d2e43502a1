"""Progress of long work: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from dsl.shown import shown_bytes
from executor.system.output import Unrepeated, as_typed, print_lines, printable

PLAIN_S = 10.0


class _LiveLine:
    """A context that may show a live progress line; `_bar` is None where there is no terminal."""

    def __init__(self, columns: Sequence[ProgressColumn], console: Console, what: str, total: int | None) -> None:
        self._lines = Unrepeated()
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = self._bar.add_task(what, total=total) if self._bar is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


class BytesDone(_LiveLine):
    """A progress line for bytes; call `advance` with the bytes done since the last call."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._shown_at = time.monotonic()
        columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        super().__init__(columns, Console(stderr=True), what, total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def advance(self, size: int) -> None:
        self._done += size
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, total=max(self._total, self._done))
        elif time.monotonic() - self._shown_at >= PLAIN_S:
            self._shown_at = time.monotonic()
            if line := self._lines.line(f"{self._what}: {shown_bytes(self._done)} of {shown_bytes(self._total)}"):
                print_lines(line, error=True)


class Activity(_LiveLine):
    """A progress line for steps: `status` shows the current step on stderr, `detail` how far it is, `show` prints a
    result.
    """

    def __init__(self, console: Console | None = None) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._shown_at = time.monotonic()
        super().__init__(columns, console or Console(stderr=True), "", None)

    def status(self, text: str) -> None:
        self._shown_at = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=as_typed(printable(text)))
            self._bar.start()
        elif line := self._lines.line(text):
            print_lines(line, error=True)

    def detail(self, text: str) -> None:
        """Show how far the current step is: without a terminal only PLAIN_S after the last line or later."""
        if self._bar is not None or time.monotonic() - self._shown_at >= PLAIN_S:
            self.status(text)

    def show(self, text: str) -> None:
        """Print a result above the live progress line, which is hidden while it prints."""
        is_shown = self._bar is not None and self._bar.live.is_started
        if self._bar is not None:
            self._bar.stop()
        print_lines(text)
        if self._bar is not None and is_shown:
            self._bar.start()
