"""Prefetching: an iterator in its own thread, so that the next micro-batch is ready in time.

Feature shards are memory-mapped and copies release the interpreter's lock, so reading overlaps with compute.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch
from attrs import frozen

Item = TypeVar("Item")
POLL_S = 0.2


@frozen
class _End:
    error: BaseException | None = None


class Prefetch(Generic[Item]):
    """The items of an iterable, in order; at most `depth` wait for the consumer, while one more may be made.

    An error of the iterable is raised to the consumer at its place, and by every call after it. `close` ends the
    thread; the object is a context manager that does so.
    """

    def __init__(self, items: Iterable[Item], depth: int = 2) -> None:
        self._ready: queue.Queue[Item | _End] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(items,), daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        item = self._ready.get()
        if isinstance(item, _End):
            self._ready.put(item)
            if item.error is not None:
                raise item.error
            raise StopIteration
        return item

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Prefetch[Item]:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _fill(self, items: Iterable[Item]) -> None:
        torch.set_num_threads(1)  # only of this thread: the consumer computes on all of its own
        end = _End()
        try:
            for item in items:
                if not self._put(item):
                    return
        except BaseException as error:  # noqa: BLE001 every error belongs to the consumer
            end = _End(error)
        self._put(end)

    def _put(self, item: Item | _End) -> bool:
        """False if the consumer has closed."""
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=POLL_S)
            except queue.Full:
                continue
            return True
        return False
