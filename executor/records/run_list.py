"""The list of runs with a few numbers for each, newest first."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from attrs import frozen

from dsl.errors import StoreError
from executor.records.graph_file import recorded_nodes
from executor.records.run_record import Record, Status, newest_records, newest_that_ran
from executor.records.run_tags import tags_of
from executor.store.artifact_store import SMOKE, Store
from executor.system.output import columns, one_line, shown_duration

RAN = ("miss", "resumed")
UNFINISHED = ("failed", "stopped", "killed")
TAU = "eval/tau"
MOST_TAUS = 3  # in a cell
LONGEST = 80  # characters of a name, or of the values of -s
LATEST = 20  # records that are searched for unfinished runs


@frozen(kw_only=True)
class RunRow:
    """A run's row in `dflow runs`. seconds: of work on it. draft: what load_draft read, joined by commas; "" for none.

    tau: by the node that measured it. set: the values of `-s`.
    """

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
    draft: str
    tau: Mapping[str, float]
    name: str
    set: Sequence[str]


def run_rows(records: Path, limit: int | None, *, repeated: bool) -> tuple[list[RunRow], int]:
    """The newest runs, and the number of runs left out between them: those without a tag in which nothing ran.

    repeated: leave out none.
    """
    rows: list[RunRow] = []
    left_out = 0
    for record in newest_records(records):
        if not repeated and record.repeats and not tags_of(record.folder):
            left_out += 1
        elif len(rows) == limit:
            break
        else:
            rows.append(_row(record))
    return rows, left_out


def running_runs(records: Path) -> list[Record]:
    """The runs in progress, newest first."""
    return [record for record in newest_records(records) if record.state.status == "running" and record.is_alive()]


def unfinished_runs(records: Path) -> list[Record]:
    """The latest runs that can be resumed, starting with the one that stopped last.

    A run is left out if a later run of its pipeline finished all of its nodes.
    """
    finished: list[Record] = []
    unfinished = []
    for record in islice(newest_that_ran(records), LATEST):
        if record.state.status == "done":
            finished.append(record)
        elif record.status() in UNFINISHED and not any(_finishes(later, record) for later in finished):
            unfinished.append(record)
    return sorted(unfinished, key=Record.stopped_at, reverse=True)


def newer_smoke_run(store: Store, command: str) -> str:
    """A line on the newest run of `dflow run --smoke`, with the command to show it; empty if a later real
    run exists.
    """
    folder = store.path / SMOKE
    newest, smoke = (next(newest_records(records), None) for records in (store.records, folder / store.records.name))
    if smoke is None or (newest is not None and newest.run > smoke.run):
        return ""
    return (
        f"the latest smoke run is {smoke.run} of {smoke.state.pipeline} ({smoke.status()}): "
        f"dflow {command} --store {shlex.quote(str(folder))}"
    )


def _finishes(later: Record, record: Record) -> bool:
    return later.state.pipeline == record.state.pipeline and later.state.nodes.keys() >= record.state.nodes.keys()


def runs_text(rows: Sequence[RunRow]) -> str:
    """The runs as a table, without the columns name, draft, tau and set where no run has a value for them.

    Among a run's changed values, those that the fewest runs share come first: they tell runs apart, and long cells are
    cut.
    """
    having = Counter(value for row in rows for value in row.set)
    header = ["run", "name", "pipeline", "status", "started", "took", "nodes", "ran", "cached", "draft", "tau", "set"]
    header.append("tags")
    absent = [name for name in ("name", "draft", "tau", "set") if not any(getattr(row, name) for row in rows)]
    shown = [
        {
            "run": row.run,
            "name": one_line(row.name, LONGEST),
            "pipeline": row.pipeline,
            "status": row.status,
            "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.started)),
            "took": shown_duration(row.seconds),
            "nodes": str(row.nodes),
            "ran": str(row.ran),
            "cached": str(row.cached),
            "draft": row.draft,
            "tau": _tau_text(row.tau),
            "set": one_line(", ".join(sorted(row.set, key=having.__getitem__)), LONGEST),
            "tags": ", ".join(row.tags),
        }
        for row in rows
    ]
    header = [name for name in header if name not in absent]
    cells = [tuple(row[name] for name in header) for row in shown]
    return columns(header, cells, right=("took", "nodes", "ran", "cached"))


def _tau_text(tau: Mapping[str, float]) -> str:
    """The tau of a run's nodes as text: just the value for a single node, else the first few with their
    nodes' names.
    """
    if len(tau) == 1:
        return f"{next(iter(tau.values())):.2f}"
    more = [f"and {len(tau) - MOST_TAUS} more"] if len(tau) > MOST_TAUS else []
    return ", ".join([*(f"{node} {value:.2f}" for node, value in islice(tau.items(), MOST_TAUS)), *more])


def _drafts(record: Record) -> str:
    """The drafts that a run loaded: names of directories, and model ids; empty where the record's graph is damaged."""
    try:
        nodes = recorded_nodes(record.folder).values()
    except StoreError:
        return ""
    sources = [str(node.config.get("source", "")) for node in nodes if node.op == "load_draft"]
    return ", ".join(Path(source).name if Path(source).is_absolute() else source for source in dict.fromkeys(sources))


def _row(record: Record) -> RunRow:
    state = record.state
    nodes = state.nodes.values()
    return RunRow(
        run=state.run,
        pipeline=state.pipeline,
        status=record.status(),
        started=state.started,
        seconds=record.seconds(),
        nodes=len(nodes),
        ran=sum(node.state == "done" and node.cache in RAN for node in nodes),
        cached=sum(node.state == "done" and node.cache == "hit" for node in nodes),
        failed=sum(node.state == "failed" for node in nodes),
        tags=tags_of(record.folder),
        draft=_drafts(record),
        tau={
            name: node.metrics[TAU]
            for name, node in state.nodes.items()
            if node.state == "done" and TAU in node.metrics
        },
        name=state.name,
        set=state.overrides,
    )
