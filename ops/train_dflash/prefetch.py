"""Prefetching: an iterator in its own thread, so that the next micro-batch is ready in time.

Feature shards are memory-mapped and copies release the interpreter's lock, so reading overlaps with compute.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import torch
from attrs import frozen

AHEAD_BYTES = 2**31  # while more than these wait, no other micro-batch is made

Item = TypeVar("Item")


@frozen
class _End:
    error: BaseException | None = None


class Prefetch(Generic[Item]):
    """An iterator that makes items ahead in a thread, in order; at most `depth` wait, while one more may be made.

    No item is made while the waiting ones have more than AHEAD_BYTES; size: the bytes of an item. An error of the
    iterable is raised at its place, and by every later call. `close`, or leaving the context, ends the thread.
    """

    def __init__(self, items: Iterable[Item], depth: int = 2, size: Callable[[Item], int] = lambda _item: 0) -> None:
        self._depth, self._size = depth, size
        self._ready: deque[Item] = deque()
        self._end: _End | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._fill, args=(items,), daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._end is not None)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            assert self._end is not None
            if self._end.error is not None:
                raise self._end.error
            raise StopIteration

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
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
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def _put(self, item: Item) -> bool:
        """Add an item, and wait until another may be made; False if the consumer has closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
            self._ready.append(item)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or sum(map(self._size, self._ready)) <= AHEAD_BYTES)
            return not self._closed
