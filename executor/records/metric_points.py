"""What MLflow gets of a node's events: points whose steps never go backwards, whatever was cut and done again.

MLflow cannot take a point back. So of the steps that a retried or resumed attempt of the same key did again, the points
of the first attempt stay, and those that came again are left out: a deterministic op gave the same values, and of what
is measured (seconds, tokens a second) the first measurement counts. What is there stays there, in the same order, as
more events come: it is enough to remember how many points were sent.

A node that goes on with another key (its code was mended between two attempts) computes something else. Then what was
cut is gone, and a child run that holds points of it is made anew.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from executor.records.events import Accepted, Cut, Event, Figure, Metric, NodeChange, System

SYSTEM = "system/"  # the metrics that MLflow shows under System metrics


@frozen
class Point:
    """Values of one step, some of which another point of this step may hold too. time: seconds since 1970."""

    time: float
    step: int
    metrics: Mapping[str, float]


@frozen
class NodeEvents:
    """What the events of one node say so far.

    retained: for each time that the key had changed, how many of the earlier points still counted. accepted: with the
    time of each. figures: path by name.
    """

    points: list[Point] = field(factory=list)
    retained: list[int] = field(factory=list)
    accepted: list[tuple[float, Accepted]] = field(factory=list)
    figures: dict[str, str] = field(factory=dict)
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
            case NodeChange(key=str(key), cache=cache):
                self._begin(key, cache)
            case Figure(name, path):
                self.figures[name] = path
            case Accepted() as accepted:
                self.accepted.append((event.time, accepted))

    def _add_point(self, time: float, step: int, metrics: Mapping[str, float]) -> None:
        fresh = {name: value for name, value in metrics.items() if step > self._floors.get(name, step - 1)}
        if fresh:
            self.points.append(Point(time, step, fresh))
        for name in fresh:
            self._highest[name] = max(step, self._highest.get(name, step))

    def _add_sample(self, time: float, metrics: Mapping[str, float]) -> None:
        """What the processes of the node used at a time: nothing computes it again, so the samples are only counted."""
        shown = {f"{SYSTEM}{name}": value for name, value in metrics.items()}
        self.points.append(Point(time, len(self._samples), shown))
        self._samples.append(time)

    def _cut(self, step: int) -> None:
        if self._key.pop("changed", None):
            self._retain(step)
        else:
            self._floors.update(self._highest)

    def _begin(self, key: str, cache: str | None) -> None:
        """An attempt starts; with another key it goes on from the next cut, or from nothing."""
        if self._key.get("now", key) != key:
            if cache == "resumed":
                self._key["changed"] = key
            else:
                self._retain(None)
        self._key["now"] = key

    def _retain(self, before: int | None) -> None:
        """Only points of steps below `before` still count, for None not a single one."""
        self.points[:] = [point for point in self.points if before is not None and point.step < before]
        self.retained.append(len(self.points))
        self._floors.clear()
        self._highest.clear()
        for point in self.points:
            self._highest.update({name: max(point.step, self._highest.get(name, point.step)) for name in point.metrics})
