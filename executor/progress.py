"""How far a long reading or copying is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from dsl.sizes import shown_bytes
from executor.lines import print_lines

PLAIN_S = 10.0


class BytesDone:
    """A context manager; `advance` takes the bytes that were done since the last call."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._said_at = time.monotonic()
        console = Console(stderr=True)
        columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = self._bar.add_task(what, total=total) if self._bar is not None else None

    def advance(self, size: int) -> None:
        self._done += size
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, total=max(self._total, self._done))
        elif time.monotonic() - self._said_at >= PLAIN_S:
            self._said_at = time.monotonic()
            print_lines(f"{self._what}: {shown_bytes(self._done)} of {shown_bytes(self._total)}", error=True)

    def __enter__(self) -> BytesDone:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
