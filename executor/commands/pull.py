"""`dflow pull`: fetch pushed artifacts: of a pipeline, of a run of this store, or all where the store holds no run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dsl.errors import StoreError
from dsl.files import free_bytes
from dsl.read_toml import read_graph
from dsl.shown import shown_bytes
from executor.commands.arguments import LATEST, add_overrides, add_store, add_trust, check_store
from executor.maintenance.push_pull import (
    HasCode,
    Wanted,
    everything,
    missing_bytes,
    offered,
    pull,
    recorded,
    required_nodes,
)
from executor.maintenance.remote import Remote
from executor.planning.session import make_planner
from executor.records.run_record import find_record, newest_records
from executor.store.artifact_store import Store, store_path
from executor.system.output import FAILED, OK, counted, print_lines
from executor.system.progress import BytesDone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="a directory, or a URL such as s3://bucket/captures")
    parser.add_argument(
        "what",
        nargs="?",
        metavar="RUN|FILE",
        help=f"a pipeline, or a run of this store; default: {LATEST}, or all artifacts where the store holds no run",
    )
    add_overrides(parser)
    parser.add_argument("--node", metavar="NODE", help="only the artifact of this node, or those of all its copies")
    add_store(parser)
    add_trust(parser)


def main(options: argparse.Namespace) -> int:
    """Run `dflow pull`. Exit code 1 where neither store nor remote has an artifact of the pipeline, or of --node."""
    file = Path(options.what) if options.what and Path(options.what).suffix in (".toml", ".py") else None
    path = store_path(options.store, file)
    check_store(options, path)
    Store.open(path, write=False)
    remote = Remote(options.url)
    remote.check_format(write=False)
    store = Store.open(path, write=True)
    takes_all = options.what is None and next(newest_records(store.records), None) is None
    if file:
        wanted, absent, nodes = _of_file(store, remote, file, options)
    elif takes_all:
        wanted, absent, nodes = _of_remote(store, remote, options.node), [], 0
    else:
        wanted, absent, nodes = _of_run(store, options)
    pulled = 0
    with BytesDone("pull", missing_bytes(remote, wanted)) as done:
        for each in wanted:
            try:
                is_new = pull(store, remote, each, done.advance, partial(print_lines, error=True))
            except HasCode as error:
                if not takes_all:
                    raise
                print_lines(f"not pulled: {error}", error=True)
                continue
            pulled += is_new
            print_lines(f"{each.node}: {'pulled' if is_new else 'already in the store'}")
    for node_id in absent:
        print_lines(f"{node_id}: neither in the store nor at the remote")
    print_lines(f"{counted(pulled, 'artifact')} pulled from {remote.url}")
    if absent:
        are, they = ("is", "it") if len(absent) == 1 else ("are", "they")
        print_lines(
            f"{len(absent)} of {counted(nodes, 'node')} {are} neither in the store nor at the remote: {they} will run"
        )
    return FAILED if absent and len(absent) == nodes else OK


def _of_file(
    store: Store, remote: Remote, file: Path, options: argparse.Namespace
) -> tuple[Sequence[Wanted], Sequence[str], int]:
    """The artifacts to fetch for a pipeline, the nodes that have none anywhere, and the number of nodes requested."""
    graph = read_graph(file, options.set)
    chosen = required_nodes({node.id: node.copy for node in graph.nodes.values()}, options.node)
    found = [
        each
        for each in offered(make_planner(store, graph), remote)
        if (each if isinstance(each, str) else each.node) in chosen
    ]
    absent = [each for each in found if isinstance(each, str)]
    return [each for each in found if isinstance(each, Wanted)], absent, len(chosen)


def _of_remote(store: Store, remote: Remote, node: str | None) -> Sequence[Wanted]:
    """The artifacts to fetch: all of the remote, or those of a node. Raises StoreError where the disk lacks room."""
    wanted = everything(remote, node)
    size = missing_bytes(remote, [each for each in wanted if not store.has(each.digest)])
    if size > (free := free_bytes(store.path)):
        raise StoreError(
            f"{remote.url} holds {counted(len(wanted), 'artifact')} of {shown_bytes(size)}, and {shown_bytes(free)} "
            f"are free at {store.path}; fetch those of a pipeline: dflow pull {remote.url} FILE, or of a node: "
            "--node NODE"
        )
    return wanted


def _of_run(store: Store, options: argparse.Namespace) -> tuple[Sequence[Wanted], Sequence[str], int]:
    record = find_record(store.records, options.what)
    wanted = [each for each in recorded(store, record, options.node) if not store.has(each.digest)]
    return wanted, [], len(wanted)
