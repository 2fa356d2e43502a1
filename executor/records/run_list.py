"""The list of runs with a few numbers for each, newest first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from attrs import frozen

from executor.records.duration import run_seconds
from executor.records.run_record import Record, Status, newest_records
from executor.records.run_tags import tags_of
from executor.system.output import columns, shown_duration

RAN = ("miss", "resumed")
UNFINISHED = ("failed", "stopped", "killed")
LATEST = 20  # records that are searched for unfinished runs


@frozen(kw_only=True)
class RunRow:
    """What `dflow runs` shows of a run. seconds: see `run_seconds`."""

    run: str
    pipeline: str
    status: Status
    started: float
    seconds: float
    nodes: int
    ran: int
    cached: int
    failed: int
    tags: Sequence[str]


def run_rows(records: Path, limit: int | None) -> list[RunRow]:
    """The newest runs."""
    return [_row(record) for record in islice(newest_records(records), limit)]


def running_runs(records: Path) -> list[Record]:
    """The runs in progress, newest first."""
    return [record for record in newest_records(records) if record.state.status == "running" and record.is_alive()]


def unfinished_runs(records: Path) -> list[Record]:
    """The latest runs that can be resumed, newest first.

    Without those of a pipeline that a later run has finished.
    """
    finished: set[str] = set()
    unfinished = []
    for record in islice(newest_records(records), LATEST):
        if record.status() in UNFINISHED and record.state.pipeline not in finished:
            unfinished.append(record)
        elif record.state.status == "done":
            finished.add(record.state.pipeline)
    return unfinished


def runs_text(rows: Sequence[RunRow]) -> str:
    header = ("run", "pipeline", "status", "started", "took", "nodes", "ran", "cached", "tags")
    shown = [
        (
            row.run,
            row.pipeline,
            row.status,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.started)),
            shown_duration(row.seconds),
            *map(str, (row.nodes, row.ran, row.cached)),
            ", ".join(row.tags),
        )
        for row in rows
    ]
    return columns(header, shown, right=("took", "nodes", "ran", "cached"))


def _row(record: Record) -> RunRow:
    state = record.state
    nodes = state.nodes.values()
    return RunRow(
        run=state.run,
        pipeline=state.pipeline,
        status=record.status(),
        started=state.started,
        seconds=run_seconds(record),
        nodes=len(nodes),
        ran=sum(node.state == "done" and node.cache in RAN for node in nodes),
        cached=sum(node.state == "done" and node.cache == "hit" for node in nodes),
        failed=sum(node.state == "failed" for node in nodes),
        tags=tags_of(record.folder),
    )
