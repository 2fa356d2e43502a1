"""`dflow resume`: continue a run, or rerun a part of it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dsl.errors import PipelineError, StoreError
from dsl.finding import Finding
from executor.commands.arguments import (
    add_execution,
    add_overrides,
    add_ray,
    add_run,
    add_store,
    add_trust,
    open_store,
)
from executor.launchers.cluster_address import use_cluster
from executor.planning.session import check_inputs, resumed_run, run_from
from executor.records.run_list import UNFINISHED, newer_smoke_run, unfinished_runs
from executor.records.run_record import Record, find_record
from executor.scheduler.run_and_report import run_and_report
from executor.store.artifact_store import SMOKE, Store
from executor.system.output import OK, print_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the one that stopped last")
    add_overrides(parser)
    parser.add_argument(
        "--from",
        dest="start",
        action="append",
        default=[],
        metavar="NODE",
        help="rerun these nodes and all nodes downstream of them, keep the rest",
    )
    parser.add_argument("--adopt", action="store_true", help="continue unfinished work of older code")
    add_execution(parser)
    add_store(parser)
    add_trust(parser)
    add_ray(parser)


def main(options: argparse.Namespace) -> int:
    use_cluster(options.ray)
    record, others = _choose(open_store(options), options)
    store = open_store(options, write=True)
    say = partial(print_lines, error=True)
    if options.start:
        if options.adopt:
            hint = "--from starts with empty work folders; leave --adopt out"
            raise PipelineError([Finding("--adopt continues unfinished work, --from does not", advice=hint)])
        check_inputs(store, record, options.start, options.set, say)
        session = run_from(store, record.run, options.start, options.set)
        return run_and_report(session, keep_going=options.keep_going, verify_inputs=options.verify_inputs)
    _print_choice(record, others)
    if file := _edited_file(record):
        print_lines(f"{file} was edited after this run began, and resume goes on with what it was: {_run(file)}")
    check_inputs(store, record, (), options.set, say)
    session = resumed_run(store, record.run, options.set)
    code = run_and_report(
        session, adopt=options.adopt, keep_going=options.keep_going, verify_inputs=options.verify_inputs
    )
    if code == OK and store.path.name == SMOKE:
        print_lines("for the estimates of the full run, repeat the command of the smoke run: what is done is cached")
    return code


def _choose(store: Store, options: argparse.Namespace) -> tuple[Record, Sequence[Record]]:
    """The run to resume, and the other unfinished runs.

    It is the run that the user named, else the unfinished run that stopped last, else the latest run. With --from it is
    the latest, finished or not. Raises StoreError, with the smoke run where there is one only.
    """
    unfinished = unfinished_runs(store.records) if options.run is None and not options.start else []
    if unfinished:
        return unfinished[0], unfinished[1:]
    try:
        return find_record(store.records, options.run), []
    except StoreError as error:
        smoke = newer_smoke_run(store, "resume") if options.run is None else ""
        if not smoke:
            raise
        raise StoreError(f"{error}; {smoke}") from None


def _edited_file(record: Record) -> Path | None:
    """The run's pipeline file if it changed after the run started; None where the record names none."""
    file = Path(record.state.file)
    is_edited = file.is_file() and file.stat().st_mtime > record.state.started
    return file if is_edited else None


def _run(file: Path) -> str:
    return f"dflow run {shlex.quote(str(file))}"


def _print_choice(record: Record, others: Sequence[Record]) -> None:
    """Print which run is resumed, and which others are unfinished."""
    status = record.status()
    if status in UNFINISHED:
        print_lines(f"resuming run {record.run} ({status})")
    if others:
        print_lines(f"also unfinished: {', '.join(f'{other.run} ({other.status()})' for other in others)}")
