"""`dflow report`: write runs and their differences into one HTML file."""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from executor.commands.arguments import LATEST, add_store, add_trust, check_store, open_store
from executor.records.run_record import Record, newest_that_ran
from executor.report.page import write_report
from executor.report.run_data import find_records
from executor.store.artifact_store import Store
from executor.system.output import OK, print_lines

REPORT = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help=f"a run's id, a part of it, or its tag; further runs are compared with the first; default: {LATEST}",
    )
    parser.add_argument("-o", dest="output", type=Path, metavar="FILE", help="default: beside the run's record")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    add_store(parser)
    add_trust(parser)


def main(options: argparse.Namespace) -> int:
    store = open_store(options)
    if options.trust or options.output is None:
        check_store(options, store.path)
    records = find_records(store.records, options.runs)
    path = (options.output or default_path(records)).absolute()
    write_report(store.path, [record.run for record in records], path)
    print_lines(str(path))
    if not options.runs and (line := _with_results(store, records[0])):
        print_lines(line, error=True)
    if options.open:
        webbrowser.open(path.as_uri())
    return OK


def _with_results(store: Store, latest: Record) -> str:
    """A line that names the newest run with the results that the latest run lacks; empty if it lacks none."""
    wanted = latest.state.result_nodes

    def is_done(record: Record) -> bool:
        nodes = record.state.nodes
        return all(node in nodes and nodes[node].state == "done" for node in wanted)

    if is_done(latest) or latest.is_alive():
        return ""
    older = next(filter(is_done, newest_that_ran(store.records)), None)
    if older is None:
        return ""
    return f"run {latest.run} is {latest.status()}; the newest run with results: dflow report {older.run}"


def default_path(records: Sequence[Record]) -> Path:
    """The default path of a report: in the last run's record folder, which `dflow rm` removes whole."""
    folder = records[-1].folder
    return folder / (REPORT if len(records) == 1 else f"report_of_{len(records)}_runs.html")
