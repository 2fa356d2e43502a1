"""The log of a run: lines of its record's events.jsonl, append-only; ops and the executor write them.

    {"time": seconds since 1970, "node", "attempt", "kind", ...}    kind: one of KINDS, whose class has the other fields

Lines of the kinds "run" and "state" also hold the whole state that the run or the node has from then on: `fold` of
run_record.py makes the state of the run of them.

Stages can write to the file without dflow's help, and a newer dflow may know more: other lines are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import define, field, frozen

from dsl.files import LineReader
from executor.system.json_values import Check, is_moment, is_number, is_table_of, is_text, is_whole, or_none

Validator = Callable[[object, object, Any], None]


def _must(check: Check) -> Validator:
    def validate(event: object, attribute: Any, value: Any) -> None:
        if not check(value):
            raise TypeError(f"{attribute.name}: not what an event has there")

    return validate


WHOLE, NUMBERS, MOMENT, TEXT = map(_must, (is_whole, is_table_of(is_number), is_moment, is_text))
OPTIONAL_TEXT = _must(or_none(is_text))
SYSTEM = "system/"  # the metrics that MLflow shows under System metrics


@frozen
class Metric:
    """An event: metric values that `stage.log` received."""

    step: int = field(validator=WHOLE)
    metrics: Mapping[str, float] = field(validator=NUMBERS)


@frozen
class Cut:
    """An event: metrics of earlier attempts of the node no longer count from this step on."""

    step: int = field(validator=WHOLE)


@frozen
class Progress:
    done: int = field(validator=WHOLE)
    total: int = field(validator=WHOLE)


@frozen
class Figure:
    name: str = field(validator=TEXT)
    path: str = field(validator=TEXT)


@frozen
class System:
    """An event: the current resource use of the node's processes, see system/system_metrics.py."""

    metrics: Mapping[str, float] = field(validator=NUMBERS)


@frozen(kw_only=True)
class NodeChange:
    """An event: a node's new state, see docs/running.md; further fields of the line are in its `NodeState`."""

    state: str = field(validator=TEXT)
    cache: str | None = field(default=None, validator=OPTIONAL_TEXT)
    key: str | None = field(default=None, validator=OPTIONAL_TEXT)


@frozen
class RunChange:
    """An event of the run: "planned", "started" if something has to run, and "done", "failed" or "stopped"
    at its end.
    """

    state: str = field(validator=TEXT)


@frozen
class Info:
    message: str = field(validator=TEXT)


@frozen
class Warned:
    message: str = field(validator=TEXT)


@frozen
class Differs:
    """An event: an artifact differs from what its key gave before."""

    message: str = field(validator=TEXT)


@frozen(kw_only=True)
class Accepted:
    """An event: `user` declared that the artifact holds for this key too, see store/manifest.py."""

    key: str = field(validator=TEXT)
    digest: str = field(default="", validator=TEXT)
    reason: str = field(default="", validator=TEXT)
    user: str = field(default="", validator=TEXT)


Body = Metric | Cut | Progress | Figure | System | NodeChange | RunChange | Info | Warned | Differs | Accepted
KINDS: dict[str, type[Body]] = {
    "metric": Metric,
    "cut": Cut,
    "progress": Progress,
    "figure": Figure,
    "system": System,
    "state": NodeChange,
    "run": RunChange,
    "info": Info,
    "warning": Warned,
    "differs": Differs,
    "accepted": Accepted,
}
KIND_OF = {body: kind for kind, body in KINDS.items()}
FIELDS = {body: tuple(attrs.fields_dict(body)) for body in KIND_OF}


@frozen
class Event:
    """A line of a run's log. time: seconds since 1970. node: empty for an event of the run itself."""

    time: float = field(validator=MOMENT)
    node: str = field(validator=TEXT)
    attempt: int = field(validator=WHOLE)
    body: Body

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Event | None:
        """The event in a line of the log; None for a line of another kind."""
        try:
            body = KINDS[line["kind"]]
            values = {name: line[name] for name in FIELDS[body] if name in line}
            return cls(line["time"], line["node"], line.get("attempt", 0), body(**values))
        except (KeyError, TypeError):
            return None

    def to_json(self) -> dict[str, Any]:
        """The event as a line of the log; fields that are None are left out."""
        body = self.body
        values = {name: value for name in FIELDS[type(body)] if (value := getattr(body, name)) is not None}
        return {"time": self.time, "node": self.node, "attempt": self.attempt, "kind": KIND_OF[type(body)], **values}


class EventReader:
    """Reads the events appended since the last call, at first those from a byte offset on."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._lines = LineReader(path, offset)

    def read(self) -> list[Event]:
        return [event for line in self._lines.read() if (event := Event.from_json(line)) is not None]


def read_events(path: Path) -> list[Event]:
    """All events of a record; empty where the file does not exist."""
    return EventReader(path).read()


def final_metrics(events_path: Path, node: str, start: int = 0) -> dict[str, float]:
    """The last value of each of a node's metrics, without events that were cut. start: a byte before its
    first event.
    """
    points = valid_points(event for event in EventReader(events_path, start).read() if event.node == node)
    return {name: value for point in points for name, value in point.metrics.items()}


def worked_seconds(events: Iterable[Event], until: float | None = None) -> float:
    """The seconds during which a run was worked on, without the time between its end and its resumption.

    until: the present time, for a run in progress. Any other run is taken to end with its last event, even a killed
    one.
    """
    worked = 0.0
    last: float | None = None  # time of the event before, while the run continues
    for event in events:
        if event.body == RunChange("started"):
            last = event.time
        elif event.body == RunChange("planned"):  # long after it was killed, when it is resumed
            last = None
        elif last is not None and not isinstance(event.body, Accepted):  # which may come long after
            worked += max(0.0, event.time - last)
            last = None if isinstance(event.body, RunChange) else event.time
    return worked if last is None or until is None else worked + max(0.0, until - last)


def valid_points(events: Iterable[Event]) -> list[Metric]:
    """The valid metrics of one node, in order; of steps that a resumed attempt repeated, only the last values."""
    points: list[Metric] = []
    for event in events:
        match event.body:
            case Cut(step):
                points = [point for point in points if point.step < step]
            case Metric() as point:
                points.append(point)
    return points


@frozen
class Point:
    """The metric values of one step; several points may have the same step. time: seconds since 1970."""

    time: float
    step: int
    metrics: Mapping[str, float]


@define
class NodeEvents:
    """One node's events so far: points for MLflow, whose steps never go backwards, and other values to send.

    MLflow cannot delete a point. When a retried or resumed attempt of the same key repeats steps, the first attempt's
    points are kept and the repeated ones skipped. A deterministic op repeats the same values; of measurements such as
    seconds the first one counts. Points keep their order as more events arrive.

    A node that continues with another key, since its code was fixed, computes something else. Then the points from the
    cut on are dropped, and the node's MLflow run is created anew.

    restarts: how often points were dropped, as the key had changed. accepted: with the time of each. figures: their
    names, each once. names: of all metrics, in the order of their first points. began: when the first attempt did.
    """

    points: list[Point] = field(factory=list)
    restarts: int = 0
    accepted: list[tuple[float, Accepted]] = field(factory=list)
    figures: list[str] = field(factory=list)
    names: dict[str, None] = field(factory=dict)
    began: float | None = None
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
                self.began = event.time if self.began is None else self.began
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
        """Add a sample of system metrics; its number serves as the step, since samples are never repeated."""
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
        """Begin an attempt; with another key the points continue from the next cut, or from nothing."""
        if self._key.get("now", key) != key:
            if cache == "resumed":
                self._key["changed"] = key
            else:
                self._retain(None)
        self._key["now"] = key

    def _retain(self, before: int | None) -> None:
        """Keep only points with steps below `before`; None: keep none."""
        kept = [point for point in self.points if before is not None and point.step < before]
        self.restarts += len(kept) < len(self.points)
        self.points[:] = kept
        self._floors.clear()
        self._highest.clear()
        for point in self.points:
            self._highest.update({name: max(point.step, self._highest.get(name, point.step)) for name in point.metrics})
