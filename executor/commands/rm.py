"""`dflow rm`: remove a run."""

from __future__ import annotations

import argparse
import sys

from executor.commands.arguments import add_store, add_trust, open_store
from executor.maintenance.gc import remove_run, require_untagged
from executor.records.run_record import find_folder
from executor.system.output import FAILED, OK, print_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's id, a part of it, or its tag")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_store(parser)
    add_trust(parser)


def main(options: argparse.Namespace) -> int:
    folder = find_folder(open_store(options).records, options.run)
    require_untagged(folder)
    if not options.yes and not _confirm(folder.name):
        return FAILED
    store = open_store(options, write=True)
    remove_run(store, folder)
    print_lines(
        f"run {folder.name} is removed: its record, logs and figures; "
        "`dflow gc --delete` removes what only it used; MLflow keeps its copy"
    )
    return OK


def _confirm(run: str) -> bool:
    if not sys.stdin.isatty():
        print_lines(f"run {run} is kept: no terminal to ask on; use `dflow rm {run} --yes`", error=True)
        return False
    return input(f"remove the record, logs and figures of run {run}? [y/N] ").strip().lower() in ("y", "yes")
