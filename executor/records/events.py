"""The events of a record as all readers get them: lines that lack what belongs to their kind are left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from executor.system.jsonlines import LineReader

ALL_HAVE = {"time", "node", "kind"}
HAVE = {
    "metric": {"step", "metrics"},
    "cut": {"step"},
    "progress": {"done", "total"},
    "figure": {"name", "path"},
    "system": {"metrics"},
    "state": {"state"},
    "run": {"state"},
    "info": {"message"},
    "warning": {"message"},
    "differs": {"message"},
}


class EventReader:
    """Reads the events that were added since the last call, at first those from a byte on."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._lines = LineReader(path, offset)

    def read(self) -> list[dict[str, Any]]:
        return whole_events(self._lines.read())


def read_events(path: Path) -> list[dict[str, Any]]:
    """All of a record; none where the file is not there."""
    return EventReader(path).read()


def whole_events(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Stages can write to the file without dflow's help: what another one made of it harms nobody."""
    return [line for line in lines if _is_whole(line)]


def final_metrics(events_path: Path, node: str, start: int = 0) -> dict[str, float]:
    """The last value of every metric of a node, cut events honoured; start: a byte before which it reported nothing."""
    points = valid_points([event for event in EventReader(events_path, start).read() if event["node"] == node])
    return {name: value for point in points for name, value in point["metrics"].items()}


def worked_seconds(events: Iterable[Mapping[str, Any]]) -> float:
    """How long a run was worked on: not between its end and its resumption. A kill came when its last event did."""
    worked = 0.0
    last: float | None = None  # the event before, while the run goes on
    for event in events:
        if event["kind"] == "run" and event["state"] == "started":
            last = event["time"]
        elif last is not None and event["kind"] != "accepted":  # which somebody may say long after
            worked += max(0.0, event["time"] - last)
            last = None if event["kind"] == "run" else event["time"]
    return worked


def valid_points(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metric events of one node that count, in order: what a resumed attempt did again is taken once."""
    points: list[dict[str, Any]] = []
    for event in events:
        if event["kind"] == "cut":
            points = [point for point in points if point["step"] < event["step"]]
        elif event["kind"] == "metric":
            points.append(event)
    return points


def _is_whole(line: Mapping[str, Any]) -> bool:
    kind = line.get("kind")
    if not isinstance(kind, str) or not ALL_HAVE | HAVE.get(kind, set()) <= line.keys():
        return False
    if not isinstance(line["node"], str) or not isinstance(line["time"], (int, float)):
        return False
    return kind not in ("metric", "system") or isinstance(line["metrics"], dict)
