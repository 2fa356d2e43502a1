"""The report of one run or of several as one HTML file: without scripts, fonts or anything else from the network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen
from markupsafe import Markup

from dsl.files import write_whole
from dsl.os_errors import output_errors
from executor.records.run_record import Record
from executor.report.answers import answers
from executor.report.artifacts import (
    Embedded,
    accounts_of,
    compared_sections,
    node_sections,
    samples,
    sections_and_comparisons,
)
from executor.report.comparison import configs, differences, environment
from executor.report.figures import combinations, curves, results
from executor.report.overview import overview, pipelines, troubles
from executor.report.run_data import RunFacts, columns_of, find_records, read_runs
from executor.report.templates import page
from executor.store.artifact_store import Store
from executor.system.output import moment


@frozen
class Block:
    """A part of the page, linked in its head; left out where it is empty."""

    id: str
    title: str
    content: Markup


def write_report(store: Path, run_ids: Sequence[str], path: Path) -> None:
    """Write the report of the runs with these ids, parts of ids or tags; the newest one for none.

    The first is the one that the others are compared with. A run that is running, failed or was killed, or whose
    artifacts were collected, is shown as far as it is known. Raises StoreError that names every missing run, and
    DflowError where the file cannot be written.
    """
    opened = Store.open(store, write=False)
    text = report_text(opened, find_records(opened.records, run_ids))
    with output_errors(path):
        write_whole(path, text.encode(errors="backslashreplace"))


def report_text(store: Store, records: Sequence[Record]) -> str:
    """The page as text."""
    runs = read_runs(store, records)
    blocks = [block for block in _blocks(store, runs) if block.content]
    pipeline = runs[-1].record.state.pipeline
    return page(pipeline=pipeline, runs=runs, blocks=blocks, written=moment(time.time()), store=store.path)


def _blocks(store: Store, runs: Sequence[RunFacts]) -> list[Block]:
    """What a reader wants to know of a draft comes first; with several runs, then what differs."""
    (shown, together), columns, embedded = sections_and_comparisons(runs), columns_of(runs), Embedded()
    several = [Block("differences", "Differences", differences(store, runs))] if len(runs) > 1 else []
    return [
        Block("answers", "In short", answers(columns, shown)),
        Block("runs", "Runs" if len(runs) > 1 else "Run", overview(runs)),
        Block("combinations", "Combinations", combinations(runs, columns)),
        Block("compared", "Compared", compared_sections(together, embedded)),
        *several,
        Block("results", "Results", results(columns)),
        Block("pipeline", "Pipeline", pipelines(runs)),
        Block("curves", "Curves", curves(columns)),
        Block("samples", "Samples", samples(runs, accounts_of(shown))),
        Block("artifacts", "Artifacts", node_sections(columns, shown, embedded)),
        Block("troubles", "Warnings and errors", troubles(runs)),
        Block("configs", "Configs", configs(runs)),
        Block("environment", "Environment", environment(runs)),
    ]
