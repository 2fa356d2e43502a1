"""`dflow verify`: find artifacts damaged after their commit, and take them out of use."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from dsl.errors import StoreError
from dsl.finding import Finding
from executor.commands.arguments import add_store, open_store
from executor.records.run_record import Record, find_record, newest_records
from executor.store.artifact_store import Store
from executor.store.integrity import artifact_digests, check, set_aside
from executor.system.disk_space import folder_size
from executor.system.output import FAILED, OK, counted, print_lines, shown_digest
from executor.system.progress import BytesDone
from executor.system.trust import is_own_store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help="only what these runs use; default: the whole store")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--full", action="store_true", help="read every file, including unchanged files that were verified before"
    )
    how.add_argument("--quick", action="store_true", help="check only names and sizes")
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    """Exit code 1 where something is damaged."""
    store = open_store(options)
    records = [find_record(store.records, run) for run in options.runs]
    used = (node.digest for record in records for node in record.state.nodes.values())
    digests = list(dict.fromkeys(filter(None, used))) if records else artifact_digests(store)
    total = 0 if options.quick else sum(folder_size(store.object_path(digest)) for digest in digests)
    unread: list[str] = []
    with BytesDone("verify", total) as done:
        damages = check(
            store,
            digests,
            read_all=options.full,
            sizes_only=options.quick,
            progress=done.advance,
            on_unread=unread.append,
        )
    depth = "by name and size" if options.quick else "by content"
    if unread:
        depth += f"; {counted(len(unread), 'file')} not read again, unchanged since you verified them: --full reads all"
    if not damages:
        unchanged = "is unchanged" if len(digests) == 1 else "are unchanged"
        print_lines(f"{counted(len(digests), 'artifact')} {unchanged} ({depth})")
        return OK
    _report(store, damages)
    are = "is" if len(damages) == 1 else "are"
    print_lines(f"{len(damages)} of {counted(len(digests), 'artifact')} {are} damaged ({depth})", error=True)
    return FAILED


def _report(store: Store, damages: Mapping[str, Sequence[Finding]]) -> None:
    """Print every damaged file and what rebuilds its artifact; in a store of the user's, take these out of use."""
    records = list(newest_records(store.records))
    for digest, found in damages.items():
        for damage in found:
            print_lines(str(damage), error=True)
        print_lines(f"{shown_digest(digest)}: {_rebuilt_by(records, digest)}", error=True)
    if not is_own_store(store.path):
        return
    try:
        set_aside(store, damages)
    except StoreError as error:
        print_lines(f"dflow: {error}", error=True)


def _rebuilt_by(records: Sequence[Record], digest: str) -> str:
    """The command that rebuilds an artifact, from the newest run that computed it."""
    for record in records:
        for node_id, node in record.state.nodes.items():
            if node.digest == digest and node_id not in record.state.pinned:
                return f'node "{node_id}" of {record.state.pipeline}; rebuild it with `dflow resume {record.run}`'
    return "no run of this store computed it; `dflow pull` may fetch it again"
