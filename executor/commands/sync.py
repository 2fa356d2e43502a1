"""`dflow sync`: send to MLflow what it is missing, of one run or of all."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from dsl.errors import NotTrusted, PipelineError, StoreError
from executor.commands.arguments import add_store, add_trust, open_store
from executor.records.run_record import Record, find_record, linked_logs, newest_records
from executor.store.artifact_store import Store
from executor.system.output import FAILED, OK, USAGE, print_lines
from executor.system.symlinks import refuse_links
from executor.tracking.sync_state import lacks, send_rest, sent_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="a run's id, a part of it, or its tag; default: all runs that MLflow has not received in full",
    )
    add_trust(parser)
    parser.add_argument("--all", action="store_true", help="check every run, also for what MLflow has lost since")
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    """Run `dflow sync`. Exit code 1 where MLflow did not receive everything, 2 where the store is not trusted."""
    store = open_store(options, write=True)
    if options.run is not None:
        record = find_record(store.records, options.run)
        record.lock(to_send=True)
        return _unreadable(record) or _send(store, record)
    return _send_all(store, everything=options.all)


def _send_all(store: Store, *, everything: bool) -> int:
    """Send all runs of a store to MLflow, the oldest first: cached nodes name the run that computed them.

    A server that cannot be reached is tried only once. Returns the exit code.
    """
    code = OK
    unreachable: set[str | None] = set()
    checked = 0
    for log in linked_logs(store.records):
        checked += 1
        try:
            refuse_links([log])
        except StoreError as error:
            print_lines(f"dflow: run {log.parent.name} is not sent: {error}", error=True)
            code = FAILED
    for record in reversed(list(newest_records(store.records))):
        has_no_database = record.state.tracking_uri is None and not (store.path / "mlflow.db").exists()
        is_checked = everything or has_no_database
        if not (lacks(record) or (is_checked and (record.folder / "mlflow.json").exists())):
            continue
        checked += 1
        if record.state.tracking_uri in unreachable:
            print_lines(f"run {record.run}: not sent either: same server", error=True)
            continue
        try:
            record.lock(to_send=True)
        except StoreError as error:
            if record.is_locked():
                print_lines(f"run {record.run} is still running and sends its own data")
            else:
                print_lines(f"dflow: run {record.run} is not sent: {error}", error=True)
                code = max(code, FAILED)
            continue
        if unreadable := _unreadable(record):
            code = max(code, unreadable)
        elif _send(store, record) != OK:
            unreachable.add(record.state.tracking_uri)
            code = max(code, FAILED)
        record.unlock()
    if not checked:
        hint = "" if everything else "; `dflow sync --all` also checks for what MLflow has lost"
        print_lines(f"{store.path}: nothing to send to MLflow{hint}")
    return code


def _unreadable(record: Record) -> int:
    """Check that the run's graph can be read with the current ops. Returns OK, or prints why not and returns the exit
    code.
    """
    try:
        record.graph()
    except (NotTrusted, PipelineError, StoreError) as error:
        reason = "; ".join(str(error).splitlines())
        print_lines(f"dflow: run {record.run} cannot be read, so it is not sent: {reason}", error=True)
        return USAGE if isinstance(error, NotTrusted) else FAILED
    return OK


def _send(store: Store, record: Record) -> int:
    """Send everything that MLflow lacks of a locked run. Returns the exit code."""
    print_lines(f"run {record.run}: loading MLflow, and asking it what it holds", error=True)
    warning, counts = send_rest(store.path, record.folder, print_lines)
    if warning is not None:
        print_lines(f"dflow: {warning}", error=True)
        return FAILED
    print_lines(f"run {record.run}: {_sent_text(counts)}MLflow holds all of it (run {sent_of(record).parent})")
    return OK


def _sent_text(counts: Mapping[str, int]) -> str:
    """The counts of what was sent, as text; empty if nothing was."""
    parts = [
        f"{counts[name]} {name if counts[name] > 1 else name[:-1]}"
        for name in ("runs", "points", "files")
        if counts[name]
    ]
    return f"sent {', '.join(parts)}; " if parts else ""
