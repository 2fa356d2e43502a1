"""Processes a stream of items in threads, a bounded number of items ahead, with results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 2  # items waiting for each worker, so that none is idle while a shard is written


def available_cores() -> int:
    """The number of cores that this process may use; all of the machine where the system does not restrict them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(work: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """Compute work(item) for each item in several threads; results come in order, and so do errors.

    Threads suffice, since decoding, resizing and tokenising run outside Python's lock. A process would need seconds to
    start, and would have to send pixels back.
    """
    if workers == 1:
        yield from map(work, items)
        return
    waiting: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
