"""Use of the device: matmul peak, peak memory, and time spent waiting."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TypeVar

import torch

from ops.lib.drafts.decoding.clock import synchronise

T = TypeVar("T")

# Square products, large enough to reach the peak: 0.04 s on one CPU core, 2 ms on a large GPU.
SIZES = {"cpu": 1024, "cuda": 8192}
ROUNDS = 5


@cache
def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The FLOP/s of this device in a large matrix product: the best of five, measured once per process.

    On a CPU it is measured with the threads in use at the first call.
    """
    size = SIZES[device.type]
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.mm(a, b)
    best = float("inf")
    for _ in range(ROUNDS):
        synchronise(device)
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        synchronise(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def peak_memory(device: torch.device) -> int:
    """The peak memory in bytes so far: of the allocator on a GPU, of the whole process (Linux) on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Stopwatch:
    """Measures the share of time spent waiting for items."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._lap = time.perf_counter()
        self._seconds_after_first = 0.0
        self._first: float | None = None

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The items; the wait for each is timed."""
        iterator = iter(items)
        while True:
            started = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                waited = time.perf_counter() - started
                self._seconds += waited
                self._seconds_after_first += 0.0 if self._first is None else waited
            self._first = self._first or time.perf_counter()
            yield item

    def share(self) -> float:
        """The share of time spent waiting since the last call of `share`, 0 to 1; begins a new lap."""
        now = time.perf_counter()
        share = self._seconds / max(now - self._lap, 1e-9)
        self._seconds, self._lap = 0.0, now
        return share

    def share_after_first(self) -> float:
        """The share of time spent waiting since the first item came, 0 to 1."""
        now = time.perf_counter()
        return self._seconds_after_first / max(now - (self._first or now), 1e-9)
