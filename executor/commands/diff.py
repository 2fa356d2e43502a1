"""`dflow diff`: show what differs between two runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsl.errors import StoreError
from executor.commands.arguments import add_json, add_store, open_store
from executor.planning.run_diff import compare_runs, runs_text
from executor.records.run_record import Record, find_record, newest_that_ran
from executor.system.output import OK, print_json, print_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "first",
        nargs="?",
        metavar="RUN",
        help="a run's id, a part of it, or its tag; default: the last two in which something ran",
    )
    parser.add_argument("second", nargs="?", metavar="RUN", help="default: the latest other run")
    add_json(parser)
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    store = open_store(options)
    first, second = _two_records(store.records, options.first, options.second)
    found = compare_runs(store, first, second)
    if options.json:
        nodes = [node.to_json() for node in found.nodes]
        combinations = [combination.to_json() for combination in found.combinations]
        print_json({"first": first.run, "second": second.run, "nodes": nodes, "combinations": combinations})
    else:
        print_lines(runs_text(first, second, found))
    return OK


def _two_records(records: Path, first: str | None, second: str | None) -> tuple[Record, Record]:
    """The two records to compare, the older first. Raises StoreError.

    These are the two that are named; or the one that is named and the latest other one; or the last two.
    """
    named = find_record(records, first)
    if second is not None:
        return named, find_record(records, second)
    other = next((record for record in newest_that_ran(records) if record.run != named.run), None)
    if other is None:
        raise StoreError(f"{records.parent}: the store holds no run other than {named.run} to compare with")
    return (other, named) if first is None else (named, other)
