"""Files written by a thread while the work that produces them continues."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType


class BackgroundWriter:
    """A thread that writes files one at a time, so that at most one result waits in memory.

    A failed write is raised by the next call. Leaving the context waits until everything is on disk; if it ends with an
    error, a failed write is printed as well.
    """

    def __init__(self, thread: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=thread)
        self._pending: Future[None] | None = None
        self._name = ""

    def start(self, name: str, write: Callable[..., None], *arguments: object) -> None:
        """Start a write after the one before it is done; `name` appears in the message of a failure."""
        self.wait()
        self._pending, self._name = self._pool.submit(write, *arguments), name

    def wait(self) -> None:
        """Wait until everything is on disk. Raises the error of a failed write."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        if error is None:
            self.wait()
            return
        failed = self._pending.exception() if self._pending else None
        if failed is not None:
            print(f"{self._name} was not written either: {failed}", flush=True)
