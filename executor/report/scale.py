"""Axes: from values to positions in a picture, ticks, and fewer points for long curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from attrs import frozen

LOG_FROM = 100.0  # times that the largest value exceeds the smallest
TICKS = 5
MOST_POINTS = 400
LARGEST, LEAST = 1e300, 1e-300  # values beyond are drawn there: a span or a step would overflow


@frozen
class Scale:
    """From low..high to start..end, in px; is_log: by the logarithm."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], start: float, end: float, *, is_log: bool = False) -> Scale:
        """Wide enough for all finite values, 0 to 1 where all are 0; logarithmic only where all of them are above 0."""
        finite = [_within(value) for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(finite), max(finite)
        if high - low < LEAST:
            low, high = (low - abs(low) / 2, high + abs(high) / 2) if abs(low) > LEAST else (low, 1.0)
        return cls(low, high, start, end, is_log and low > 0)

    def place(self, value: float) -> float:
        """The px of a value, which is finite."""
        low, high = self._bent(self.low), self._bent(self.high)
        return self.start + (self._bent(value) - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values inside, a few of them."""
        if not self.is_log:
            return _round_steps(self.low, self.high)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        every = max(1, (last - first) // TICKS)
        powers = [10.0**power for power in range(first, last + 1, every)]
        inside = [power for power in powers if self.low <= power <= self.high]
        return inside if len(inside) > 1 else _round_steps(self.low, self.high)

    def _bent(self, value: float) -> float:
        return math.log10(_within(value)) if self.is_log else _within(value)


def is_wide(values: Iterable[float]) -> bool:
    """Whether a logarithmic axis shows them better: all above 0, over two powers of ten."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) >= LOG_FROM * min(finite)


def thinned(x: Sequence[float], y: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Which points to draw, in order: of a long curve the first, the last, and the highest and lowest of each part.

    So no peak is lost. Values that are not finite are kept as gaps.
    """
    count = len(x)
    if count <= most:
        return list(range(count))
    size = -(-count // (most // 3))
    kept = {0, count - 1}
    for start in range(0, count, size):
        part = range(start, min(start + size, count))
        finite = [place for place in part if math.isfinite(y[place])]
        kept |= {place for place in part if not math.isfinite(y[place])} if len(finite) < len(part) // 2 else set()
        if finite:
            kept |= {min(finite, key=y.__getitem__), max(finite, key=y.__getitem__)}
    return sorted(kept)


def _within(value: float) -> float:
    return min(max(value, -LARGEST), LARGEST)


def _round_steps(low: float, high: float) -> list[float]:
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(place * step, 12 - math.floor(math.log10(step))) for place in range(first, last + 1)]
