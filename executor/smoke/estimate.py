"""How long a node takes in full, from the times at which its trial on a few samples reported progress.

A node's time is a + b * amount: a, what comes before the first progress, between two series and after the last, stays
as it is; b comes from the progress itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from attrs import frozen

from dsl.estimate import Amount, Growth
from executor.records.events import Event, Progress


@frozen
class Spread:
    """At least and at most, in seconds."""

    low: float
    high: float

    def __add__(self, other: Spread) -> Spread:
        return Spread(self.low + other.low, self.high + other.high)


NOTHING = Spread(0.0, 0.0)
ENOUGH = 4  # reports that distinguish the first step from the others


@frozen(kw_only=True)
class NodeEstimate:
    """What the full run of a node will take.

    cached: the store holds it already, so the other values are zero. tried: seconds of the trial. disk: bytes in the
    store at the end, those of checkpoints with it. memory, gpu_memory: peak bytes of the trial, its ranks together,
    None where they were not measured; needed: bytes that a rank of the full run needs, as its op estimates.
    """

    cached: bool
    tried: float = 0.0
    time: Spread = NOTHING
    disk: float = 0.0
    memory: int | None = None
    gpu_memory: int | None = None
    needed: int = 0
    ranks: int = 1
    device: str = "cpu"
    notes: tuple[str, ...] = ()


@frozen
class Report:
    """`done` of `total` at `time`."""

    time: float
    done: int
    total: int


def reports(events: Iterable[Event], node: str, attempt: int) -> list[Report]:
    """The progress that one attempt of a node reported, from the events of its run."""
    return [
        Report(event.time, event.body.done, event.body.total)
        for event in events
        if isinstance(event.body, Progress) and (event.node, event.attempt) == (node, attempt)
    ]


def series_of(reported: Sequence[Report]) -> list[list[Report]]:
    """The reports cut where counting began again."""
    series: list[list[Report]] = []
    for report in reported:
        if not series or report.done < series[-1][-1].done:
            series.append([])
        series[-1].append(report)
    return series


def full_time(started: float, ended: float, reported: Sequence[Report], growth: Growth) -> Spread:
    """The time of the full run. Series without an amount of their own stay as they are.

    An amount without a series, of a stage that reported no progress, may be all of the time or nothing of it.
    """
    series = series_of(reported)
    stays = max(0.0, ended - started)
    grown = NOTHING
    begun = started
    for reports_of_one, amount in zip(series, growth.series, strict=False):
        spent, full = _grown(begun, reports_of_one, amount)
        stays, grown = max(0.0, stays - spent), grown + full
        begun = reports_of_one[-1].time
    unreported = [amount.growth for amount in growth.series[len(series) :]]
    tail = max(0.0, ended - reported[-1].time) if reported else 0.0
    most = stays * max([1.0, *unreported]) + tail * (growth.tail - 1)
    return grown + Spread(stays * min([1.0, *unreported]), most)


def _grown(begun: float, reported: Sequence[Report], amount: Amount) -> tuple[float, Spread]:
    """(seconds of the trial that belong to the series, its time in the full run).

    The lower bound is by the usual pace, the upper one by the mean: a checkpoint waits for the disk once in the trial,
    and an unknown number of times in the full run. The extra time of the first step counts once: it compiles, and fills
    caches.
    """
    first, last = reported[0], reported[-1]
    counted = last.done - first.done
    if counted <= 0 or last.total <= 0:  # reported only at its end: all since the last report, or nothing of it
        spent = max(0.0, last.time - begun)
        return spent, Spread(spent * min(1.0, amount.least_growth), spent * max(1.0, amount.growth))
    pace = _usual_pace(reported)
    once = 0.0
    if len(reported) >= ENOUGH:
        once = max(0.0, reported[1].time - first.time - pace * (reported[1].done - first.done))
    seen = max(0.0, last.time - first.time - once)
    mean = seen / counted * last.total
    unseen = min(mean * first.done / last.total, max(0.0, first.time - begun))  # done before the first report
    paces = sorted((mean, pace * last.total))
    return seen + unseen, Spread(paces[0] * amount.least_growth, paces[1] * amount.growth)


def _usual_pace(reported: Sequence[Report]) -> float:
    """The median of the seconds for one, over all that was done."""
    steps = [(after.time - before.time, after.done - before.done) for before, after in pairwise(reported)]
    paces = sorted((max(0.0, seconds) / count, count) for seconds, count in steps if count > 0)
    half = sum(count for _, count in paces) / 2
    for pace, count in paces:
        half -= count
        if half <= 0:
            return pace
    return 0.0
