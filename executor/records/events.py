"""What ops and the executor report of a run: lines of its record's events.jsonl, append-only.

    {"time": seconds since 1970, "node", "attempt", "kind", ...}    kind: one of KINDS, whose class has the other fields

Stages can write to the file without dflow's help, and a newer dflow may know more: other lines are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen

from dsl.json_files import LineReader
from executor.system.json_values import Check, is_moment, is_number, is_table_of, is_text, is_whole, or_none

Validator = Callable[[object, object, Any], None]


def _must(check: Check) -> Validator:
    def validate(event: object, attribute: Any, value: Any) -> None:
        if not check(value):
            raise TypeError(f"{attribute.name}: not what an event has there")

    return validate


WHOLE, NUMBERS, MOMENT, TEXT = map(_must, (is_whole, is_table_of(is_number), is_moment, is_text))
OPTIONAL_TEXT, OPTIONAL_NUMBER = (_must(or_none(check)) for check in (is_text, is_number))


@frozen
class Metric:
    """What `stage.log` got."""

    step: int = field(validator=WHOLE)
    metrics: Mapping[str, float] = field(validator=NUMBERS)


@frozen
class Cut:
    """Metrics of earlier attempts of the node at this step or later no longer count."""

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
    """What the node's processes use now, see system/system_metrics.py."""

    metrics: Mapping[str, float] = field(validator=NUMBERS)


@frozen(kw_only=True)
class NodeChange:
    """A node's state and what belongs to it, see docs/running.md. wait: seconds."""

    state: str = field(validator=TEXT)
    cache: str | None = field(default=None, validator=OPTIONAL_TEXT)
    key: str | None = field(default=None, validator=OPTIONAL_TEXT)
    digest: str | None = field(default=None, validator=OPTIONAL_TEXT)
    seconds: float | None = field(default=None, validator=OPTIONAL_NUMBER)
    failure: Mapping[str, str] | None = None
    wait: float | None = field(default=None, validator=OPTIONAL_NUMBER)
    changes: tuple[str, ...] | None = None


@frozen
class RunChange:
    """Of the run itself: "started", and in the end "done", "failed" or "stopped"."""

    state: str = field(validator=TEXT)


@frozen
class Info:
    message: str = field(validator=TEXT)


@frozen
class Warned:
    message: str = field(validator=TEXT)


@frozen
class Differs:
    """An artifact differs from what its key gave before."""

    message: str = field(validator=TEXT)


@frozen(kw_only=True)
class Accepted:
    """`user` declared that the artifact holds for this key too, see store/index_line.py."""

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
    """time: seconds since 1970. node: empty for an event of the run itself."""

    time: float = field(validator=MOMENT)
    node: str = field(validator=TEXT)
    attempt: int = field(validator=WHOLE)
    body: Body

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Event | None:
        """None for a line that is no event of these kinds."""
        try:
            body = KINDS[line["kind"]]
            values = {name: line[name] for name in FIELDS[body] if name in line}
            return cls(line["time"], line["node"], line.get("attempt", 0), body(**values))
        except (KeyError, TypeError):
            return None

    def to_json(self) -> dict[str, Any]:
        """The line; fields that are None are left out."""
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
    """The last value of every metric of a node, after cut events; start: a byte offset before its first event."""
    points = valid_points(event for event in EventReader(events_path, start).read() if event.node == node)
    return {name: value for point in points for name, value in point.metrics.items()}


def worked_seconds(events: Iterable[Event], until: float | None = None) -> float:
    """How long a run was worked on: not between its end and its resumption.

    until: now, of a run in progress; any other ended with its last event at the latest, also one that was killed.
    """
    worked = 0.0
    last: float | None = None  # time of the event before, while the run continues
    for event in events:
        if event.body == RunChange("started"):
            last = event.time
        elif last is not None and not isinstance(event.body, Accepted):  # which may come long after
            worked += max(0.0, event.time - last)
            last = None if isinstance(event.body, RunChange) else event.time
    return worked if last is None or until is None else worked + max(0.0, until - last)


def valid_points(events: Iterable[Event]) -> list[Metric]:
    """The metrics of one node that count, in order: of what a resumed attempt repeated, the last."""
    points: list[Metric] = []
    for event in events:
        match event.body:
            case Cut(step):
                points = [point for point in points if point.step < step]
            case Metric() as point:
                points.append(point)
    return points
