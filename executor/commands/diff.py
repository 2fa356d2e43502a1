"""`dflow diff`: show what differs between two runs."""

from __future__ import annotations

import argparse
import json

from executor.commands.arguments import add_json, add_store
from executor.exits import OK
from executor.lines import print_lines
from executor.record import find_record
from executor.run_diff import compare_runs
from executor.run_diff_text import runs_text
from executor.store import Store, store_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="RUN", help="a run's id or a part of it, or its tag")
    parser.add_argument("second", nargs="?", metavar="RUN", help="the latest unless given")
    add_json(parser)
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    store = Store.open(store_path(options.store, None), write=False)
    first, second = find_record(store.records, options.first), find_record(store.records, options.second)
    nodes = compare_runs(store, first, second)
    if options.json:
        told = {"first": first.run, "second": second.run, "nodes": [node.to_json() for node in nodes]}
        print_lines(json.dumps(told, indent=1, allow_nan=False))
    else:
        print_lines(runs_text(first, second, nodes))
    return OK
