"""`dflow push`: copy a run's artifacts to a shared directory or bucket."""

from __future__ import annotations

import argparse

from executor.commands.arguments import add_run, add_store, add_trust, check_store, open_store
from executor.maintenance.push_pull import accepted, push, push_key, recorded
from executor.maintenance.remote import Remote
from executor.records.run_record import find_record
from executor.system.output import OK, counted, print_lines
from executor.system.progress import BytesDone
from executor.system.symlinks import folder_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="a directory, or a URL such as s3://bucket/captures")
    add_run(parser)
    parser.add_argument("--node", metavar="NODE", help="only the artifact of this node, or those of all its copies")
    add_store(parser)
    add_trust(parser)


def main(options: argparse.Namespace) -> int:
    store = open_store(options)
    check_store(options, store.path)
    record = find_record(store.records, options.run)
    wanted = recorded(store, record, options.node)
    remote = Remote(options.url)
    remote.check_format(write=True)
    total = sum(folder_size(store.object_path(each.digest)) for each in wanted)
    sent = 0
    with BytesDone("push", total) as done:
        for each in wanted:
            is_new = push(store, remote, each, done.advance)
            sent += is_new
            print_lines(f"{each.node}: {'sent' if is_new else 'already there'}")
    for each in accepted(store, wanted):
        if push_key(remote, each):
            print_lines(f"{each.node}: its acceptance was sent too")
    number, stored = counted(len(wanted), "artifact"), "it" if len(wanted) == 1 else "all of them"
    print_lines(f"run {record.run}: {sent} of {number} sent to {remote.url}, which now holds {stored}")
    return OK
