"""`dflow tag`: name a run, which protects what it uses from gc."""

from __future__ import annotations

import argparse

from executor.commands.arguments import add_store, add_trust, open_store
from executor.records.run_record import find_folder
from executor.records.run_tags import add_tag, remove_tag
from executor.store.gc_lock import exclusive_gc_lock
from executor.system.output import OK, print_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's id, a part of it, or its tag")
    parser.add_argument("name", metavar="NAME", help="the tag, accepted wherever a command takes RUN")
    parser.add_argument("--remove", action="store_true", help="remove the tag")
    add_store(parser)
    add_trust(parser)


def main(options: argparse.Namespace) -> int:
    find_folder(open_store(options).records, options.run)
    store = open_store(options, write=True)
    with exclusive_gc_lock(store.path):  # two concurrent commands cannot give one tag to two runs
        folder = find_folder(store.records, options.run)
        if options.remove:
            remove_tag(folder, options.name)
        else:
            add_tag(folder, options.name)
    print_lines(f'run {folder.name} {"no longer has" if options.remove else "has"} the tag "{options.name}"')
    return OK
