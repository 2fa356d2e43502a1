"""The report of one run or of several as one HTML file: without scripts, fonts or anything else from the network."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from executor.records.run_record import Record
from executor.report.columns import columns_of
from executor.report.combinations import combinations_block
from executor.report.curves import curves
from executor.report.differences import differences
from executor.report.embedded import Embedded
from executor.report.find import find_records
from executor.report.markup import Markup, element, html, joined
from executor.report.nodes import pipelines, time_and_disk
from executor.report.overview import overview
from executor.report.results import results
from executor.report.run_data import RunFacts, read_runs
from executor.report.samples import samples
from executor.report.sections import accounts_of, asked_of, node_sections
from executor.report.settings import configs, environment
from executor.report.style import PAGE_STYLE
from executor.report.troubles import troubles
from executor.store.artifact_store import Store
from executor.system.os_errors import output_errors
from executor.system.output import moment
from executor.system.symlinks import new_file
from ops.lib.page_style import STYLE

# A browser loads nothing but what the file holds, in the frames of artifacts' own pages neither.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@frozen
class Block:
    """A part of the page that its head leads to; left out where it is empty."""

    id: str
    title: str
    content: Markup


def write_report(store: Path, run_ids: Sequence[str], path: Path) -> None:
    """Write the report of the runs with these ids, parts of ids or tags; the newest one for none.

    Of several, the first is the one that the others are compared with. A run that still goes on, failed, was killed or
    whose artifacts were collected is told as far as it is known. Raises StoreError that names every run which is not
    there, and DflowError where the file cannot be written.
    """
    opened = Store.open(store, write=False)
    text = report_text(opened, find_records(opened.records, run_ids))
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with output_errors(path):
        with new_file(fresh) as file:
            file.write(text.encode(errors="backslashreplace"))
        fresh.replace(path)


def report_text(store: Store, records: Sequence[Record]) -> str:
    """The page as a text."""
    runs = read_runs(store, records)
    shown = [block for block in _blocks(store, runs) if block.content]
    title = f"{runs[-1].record.state.pipeline}: {', '.join(run.run for run in runs)}"
    links = element("nav", *(element("a", block.title, href=f"#{block.id}") for block in shown))
    parts = [element("section", element("h2", block.title), block.content, id=block.id) for block in shown]
    name = runs[-1].record.state.pipeline
    told = f"{len(runs)} runs: {', '.join(run.label for run in runs)}" if len(runs) > 1 else f"run {runs[0].run}"
    head = element("header", element("h1", name, element("small", f" {told}")), links)
    foot = element("footer", f"Written by dflow on {moment(time.time())}. Store: {store.path}")
    return "".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{html(POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            element("title", title),
            f"<style>{STYLE}{PAGE_STYLE}</style></head>\n<body>",
            joined([head, element("main", *parts), foot], "\n"),
            "</body></html>\n",
        ]
    )


def _blocks(store: Store, runs: Sequence[RunFacts]) -> list[Block]:
    """With several runs, what differs comes first."""
    shown, columns = asked_of(runs), columns_of(runs)
    several = [Block("differences", "Differences", differences(store, runs, columns))] if len(runs) > 1 else []
    return [
        Block("runs", "Runs" if len(runs) > 1 else "Run", overview(runs)),
        Block("combinations", "Combinations", combinations_block(runs, columns)),
        *several,
        Block("results", "Results", results(columns)),
        Block("pipeline", "Pipeline", pipelines(runs)),
        Block("curves", "Curves", curves(columns)),
        Block("samples", "Samples", samples(runs, accounts_of(shown))),
        Block("artifacts", "Artifacts", node_sections(columns, shown, Embedded())),
        Block("cost", "Time and disk", time_and_disk(runs)),
        Block("troubles", "Warnings and errors", troubles(runs)),
        Block("configs", "Configs", configs(runs)),
        Block("environment", "Environment", environment(runs)),
    ]
