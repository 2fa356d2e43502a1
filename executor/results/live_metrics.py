"""Progress and current metrics of the nodes that run now, from their events."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define, field

from executor.records.events import Metric, Progress, read_events
from executor.records.run_record import Record
from executor.results.run_table import shown_metrics


@define
class LiveFigures:
    """done of total, None where the op reports no progress; metrics: those of the newest event."""

    done: int | None = None
    total: int | None = None
    metrics: Mapping[str, float] = field(factory=dict)

    def __str__(self) -> str:
        progress = f"{self.done} of {self.total}" if self.done is not None else "running"
        return f"{progress}: {shown_metrics(self.metrics)}" if self.metrics else progress


def live_figures(record: Record) -> dict[str, LiveFigures]:
    """By node, in the order of the graph."""
    nodes = record.state.nodes.items()
    running = {node_id: (node.attempt, LiveFigures()) for node_id, node in nodes if node.state == "running"}
    for event in read_events(record.events_path) if running else ():
        attempt, figures = running.get(event.node, (None, LiveFigures()))
        if event.attempt != attempt:
            continue
        match event.body:
            case Progress(done, total):
                figures.done, figures.total = done, total
            case Metric(_, metrics):
                figures.metrics = metrics
    return {node_id: figures for node_id, (_, figures) in running.items()}
