"""`dflow sync`: send to MLflow what it lacks of a run."""

from __future__ import annotations

import argparse

from executor.commands.arguments import add_run, add_store
from executor.exits import FAILED, OK
from executor.follow import send_in_foreground
from executor.lines import print_lines
from executor.record import find_record, mlflow_ids
from executor.store import Store, store_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    store = Store.open(store_path(options.store, None), write=True)
    record = find_record(store.records, options.run)
    record.lock()
    warning = send_in_foreground(store.path, record.folder)
    if warning is not None:
        print_lines(f"dflow: {warning}", error=True)
        return FAILED
    print_lines(f"run {record.run}: MLflow holds all of it (run {mlflow_ids(store.records, record)['parent']})")
    return OK
