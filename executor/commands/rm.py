"""`dflow rm`: remove a run."""

from __future__ import annotations

import argparse
import sys

from executor.commands.arguments import add_store
from executor.maintenance.remove_run import remove_run, require_untagged
from executor.records.run_record import find_folder
from executor.store.artifact_store import Store, store_path
from executor.system.exits import FAILED, OK
from executor.system.output import print_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's id or a part of it, or a tag")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    folder = find_folder(Store.open(store_path(options.store, None), write=False).records, options.run)
    require_untagged(folder)
    if not options.yes and not _agreed(folder.name):
        return FAILED
    store = Store.open(store_path(options.store, None), write=True)
    remove_run(store, folder)
    print_lines(
        f"run {folder.name} is removed: its record, logs and figures; "
        "what only it used goes by `dflow gc --delete`; MLflow keeps what it was sent"
    )
    return OK


def _agreed(run: str) -> bool:
    if not sys.stdin.isatty():
        print_lines(f"run {run} stays: nobody can be asked here; say `dflow rm {run} --yes`", error=True)
        return False
    return input(f"remove the record, logs and figures of run {run}? [y/N] ").strip().lower() in ("y", "yes")
