"""`dflow runs`: list the runs of a store."""

from __future__ import annotations

import argparse

import attrs

from executor.commands.arguments import add_json, add_store, count, open_store
from executor.records.run_list import run_rows, runs_text
from executor.system.output import OK, print_json, print_lines

SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", type=count, default=SHOWN, metavar="N", help=f"number of runs, newest first; 0 for all; default: {SHOWN}"
    )
    add_json(parser)
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    store = open_store(options)
    rows = run_rows(store.records, options.n or None)
    if options.json:
        print_json({"runs": list(map(attrs.asdict, rows))})
    else:
        print_lines(runs_text(rows) if rows else f"{store.path}: the store holds no run yet")
        if rows and rows[0].status == "killed":
            print_lines(f"the newest was killed; resume it with: dflow resume {rows[0].run}")
    return OK
