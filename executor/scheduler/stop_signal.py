"""Ctrl-C, SIGTERM and a closed terminal, noted for the loop of a run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignal:
    """How many stop signals a run got, and the last one's number; each time `wake` is called, to end a wait."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.number = 0
        self.count = 0
        self._wake = wake

    def is_set(self) -> bool:
        return self.count > 0

    @contextmanager
    def caught(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where a shell ignores it, nobody would see how a stage ended
        before = [signal.signal(number, self._note) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self.count += 1
        self._wake()
