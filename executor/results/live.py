"""What a running node has reported: how far it is, how fast, for how long still, and its newest metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from attrs import define, field

from executor.records.events import Event, Metric, Progress
from executor.results.run_table import shown_metrics
from executor.system.output import shown_duration

WINDOW = 30  # reports of progress that the speed is taken from


@define
class Live:
    """The progress of one attempt, made from its events. metrics: those of the newest event.

    done, total: units of work; None without progress.
    """

    done: int | None = None
    total: int | None = None
    metrics: Mapping[str, float] = field(factory=dict)
    _reports: deque[tuple[float, int]] = field(factory=lambda: deque(maxlen=WINDOW))  # (time, done), of one series

    def __str__(self) -> str:
        return self._with_metrics([self.reached, *self._pace()])

    @property
    def reached(self) -> str:
        """The progress as text, `40 of 200`; "" without progress."""
        return "" if self.done is None else f"{self.done} of {self.total}"

    @property
    def reached_with_metrics(self) -> str:
        """The progress and metrics of an attempt that has ended, without speed."""
        return self._with_metrics([self.reached])

    def add(self, event: Event) -> bool:
        """Add an event. Returns whether it changes progress or metrics."""
        match event.body:
            case Progress(done, total):
                if self.done is not None and done < self.done:
                    self._reports.clear()
                self.done, self.total = done, total
                self._reports.append((event.time, done))
            case Metric(_, metrics):
                self.metrics = metrics
            case _:
                return False
        return True

    def _with_metrics(self, progress: Sequence[str]) -> str:
        return ": ".join(text for text in (", ".join(filter(None, progress)), shown_metrics(self.metrics)) if text)

    def _pace(self) -> list[str]:
        """The speed and time left as texts, `2.5/s`, `1 min 4 s left`, from the last reports.

        Empty before the second report, and after the last.
        """
        if len(self._reports) < 2:
            return []
        (first_time, first), (last_time, last) = self._reports[0], self._reports[-1]
        seconds, left = last_time - first_time, (self.total or 0) - last
        if seconds <= 0 or last <= first or left <= 0:
            return []
        speed = (last - first) / seconds
        shown = f"{speed:.3g}/s" if speed >= 1 else f"{1 / speed:.3g} s each"
        return [shown, f"{shown_duration(left / speed)} left"]
