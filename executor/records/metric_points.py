"""The points of a node's events that MLflow gets: steps never go backwards, whatever was cut and repeated.

MLflow cannot delete a point. So of steps that a retried or resumed attempt of the same key repeats, the points
of the first attempt are kept, and the repeated ones are skipped: a deterministic op gives the same values, and of
measurements (seconds, tokens per second) the first one counts. Points stay in the same order as more events arrive.

A node that continues with another key (its code was fixed between two attempts) computes something else. Then the
cut points are dropped, and a child run that may have some of them is created again.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define, field, frozen

from executor.records.events import Accepted, Cut, Event, Figure, Metric, NodeChange, System

SYSTEM = "system/"  # the metrics that MLflow shows under System metrics


@frozen
class Point:
    """Values of one step; several points may have the same step. time: seconds since 1970."""

    time: float
    step: int
    metrics: Mapping[str, float]


@define
class NodeEvents:
    """The state of one node from its events so far.

    restarts: how often points were dropped, as the key had changed. accepted: with the time of each. figures: their
    names, each once. names: of all metrics, in the order of their first points.
    """

    points: list[Point] = field(factory=list)
    restarts: int = 0
    accepted: list[tuple[float, Accepted]] = field(factory=list)
    figures: list[str] = field(factory=list)
    names: dict[str, None] = field(factory=dict)
    _floors: dict[str, int] = field(factory=dict)  # per metric: the last step of earlier attempts
    _highest: dict[str, int] = field(factory=dict)
    _samples: list[float] = field(factory=list)  # their times
    _key: dict[str, str] = field(factory=dict)  # "now"; "changed" where it did and no cut came since

    def add(self, event: Event) -> None:
        match event.body:
            case Metric(step, metrics):
                self._add_point(event.time, step, metrics)
            case System(metrics):
                self._add_sample(event.time, metrics)
            case Cut(step):
                self._cut(step)
            case NodeChange(state="running", key=str(key), cache=cache):
                self._begin(key, cache)
            case Figure(name) if name not in self.figures:
                self.figures.append(name)
            case Accepted() as accepted:
                self.accepted.append((event.time, accepted))

    def _add_point(self, time: float, step: int, metrics: Mapping[str, float]) -> None:
        fresh = {name: value for name, value in metrics.items() if step > self._floors.get(name, step - 1)}
        if fresh:
            self.points.append(Point(time, step, fresh))
        for name in fresh:
            self.names[name] = None
            self._highest[name] = max(step, self._highest.get(name, step))

    def _add_sample(self, time: float, metrics: Mapping[str, float]) -> None:
        """Add a sample of system metrics. Samples are never repeated, so their number serves as the step."""
        shown = {f"{SYSTEM}{name}": value for name, value in metrics.items()}
        self.names.update(dict.fromkeys(shown))
        self.points.append(Point(time, len(self._samples), shown))
        self._samples.append(time)

    def _cut(self, step: int) -> None:
        if self._key.pop("changed", None):
            self._retain(step)
        else:
            self._floors.update(self._highest)

    def _begin(self, key: str, cache: str | None) -> None:
        """An attempt starts; with another key it continues from the next cut, or from nothing."""
        if self._key.get("now", key) != key:
            if cache == "resumed":
                self._key["changed"] = key
            else:
                self._retain(None)
        self._key["now"] = key

    def _retain(self, before: int | None) -> None:
        """Keep only points of steps below `before`; None: none."""
        kept = [point for point in self.points if before is not None and point.step < before]
        self.restarts += len(kept) < len(self.points)
        self.points[:] = kept
        self._floors.clear()
        self._highest.clear()
        for point in self.points:
            self._highest.update({name: max(point.step, self._highest.get(name, point.step)) for name in point.metrics})
