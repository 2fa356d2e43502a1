"""`dflow runs`: list the runs of a store."""

from __future__ import annotations

import argparse

import attrs

from executor.commands.arguments import add_json, add_store, count, open_store
from executor.records.run_list import newer_smoke_run, run_rows, runs_text
from executor.records.run_record import no_run_text
from executor.system.output import OK, counted, print_json, print_lines

SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", type=count, default=SHOWN, metavar="N", help=f"number of runs, newest first; 0 for all; default: {SHOWN}"
    )
    parser.add_argument("--all", action="store_true", help="also runs in which nothing ran")
    add_json(parser)
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    store = open_store(options)
    rows, left_out = run_rows(store.records, options.n or None, repeated=options.all)
    if options.json:
        print_json({"runs": list(map(attrs.asdict, rows))})
    else:
        print_lines(runs_text(rows) if rows else no_run_text(store.path))
        if rows and rows[0].status == "killed":
            print_lines(f"the newest was killed; resume it with: dflow resume {rows[0].run}")
        if left_out:
            print_lines(f"{counted(left_out, 'run')} in which nothing ran left out; --all shows all")
        if line := newer_smoke_run(store, "runs"):
            print_lines(line)
    return OK
