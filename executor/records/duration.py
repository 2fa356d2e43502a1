"""How long a run took: the one figure that `dflow runs`, `dflow status`, the report and MLflow show."""

from __future__ import annotations

import time

from executor.records.events import read_events, worked_seconds
from executor.records.run_record import Record


def run_seconds(record: Record) -> float:
    """The seconds in which an executor worked on the run, until now if one does: without the time between its end, or
    when it was killed, and its resumption. Where nothing ran, from its start to its end.
    """
    now = time.time() if record.status() == "running" else None
    worked = worked_seconds(read_events(record.events_path), now)
    end = record.state.ended or now
    return worked or (0.0 if end is None else max(0.0, end - record.state.started))
