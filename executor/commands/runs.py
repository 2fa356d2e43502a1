"""`dflow runs`: list the runs of a store, and name them, which protects what they use from gc."""

from __future__ import annotations

import argparse

import attrs

from executor.commands.arguments import add_json, add_store, add_trust, count, open_store
from executor.records.run_list import newer_smoke_run, run_rows, runs_text
from executor.records.run_record import find_folder, no_run_text
from executor.records.run_tags import add_tag, remove_tag
from executor.system.file_locks import exclusive_gc_lock
from executor.system.output import OK, counted, print_json, print_lines

SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", type=count, default=SHOWN, metavar="N", help=f"number of runs, newest first; 0 for all; default: {SHOWN}"
    )
    parser.add_argument("--all", action="store_true", help="also runs in which nothing ran")
    tags = parser.add_mutually_exclusive_group()
    tags.add_argument(
        "--tag",
        nargs=2,
        metavar=("NAME", "RUN"),
        help="name a run, which protects what it uses from gc; a name is accepted wherever a command takes RUN",
    )
    tags.add_argument("--untag", metavar="NAME", help="remove a name")
    add_json(parser)
    add_store(parser)
    add_trust(parser)


def main(options: argparse.Namespace) -> int:
    if options.tag is not None:
        return _tag(options, *options.tag)
    if options.untag is not None:
        return _tag(options, options.untag, options.untag, remove=True)
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


def _tag(options: argparse.Namespace, name: str, run: str, *, remove: bool = False) -> int:
    """Add a tag to a run, or remove it. A missing store is not created."""
    find_folder(open_store(options).records, run)
    store = open_store(options, write=True)
    with exclusive_gc_lock(store.path):  # no two commands give one name to two runs
        folder = find_folder(store.records, run)
        (remove_tag if remove else add_tag)(folder, name)
    print_lines(f'run {folder.name} {"no longer has" if remove else "has"} the tag "{name}"')
    return OK
