"""`dflow accept`: keep artifacts valid across a change of code that does not affect them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dsl.errors import StoreError
from dsl.read_toml import read_graph
from executor.commands.arguments import add_file, add_overrides, add_store, add_trust, open_store
from executor.keys.differences import difference_text
from executor.planning.keep_valid import keep_valid, offer_of, offers
from executor.planning.session import make_planner, require_node
from executor.records.run_record import Record
from executor.store.artifact_store import Store
from executor.system.output import FAILED, OK, USAGE, print_lines, shown_digest
from executor.tracking.sync_state import is_tracked, send_rest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_overrides(parser)
    parser.add_argument(
        "node", nargs="?", metavar="NODE", help="default: all nodes that differ by code only from finished artifacts"
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="why the change is harmless")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_store(parser)
    add_trust(parser)


def main(options: argparse.Namespace) -> int:
    graph = read_graph(options.file, options.set)
    if options.node is not None:
        require_node(graph, options.node)
    if not options.yes and not sys.stdin.isatty():
        print_lines("dflow: no terminal to ask on; check `dflow plan FILE --why NODE`, then pass --yes", error=True)
        return USAGE
    store = open_store(options, write=True)
    planner = make_planner(store, graph)
    found = offers(store, planner) if options.node is None else [offer_of(store, planner, options.node)]
    for offer in found:
        print_lines(f"{offer.node}: {shown_digest(offer.line.digest)} was made by run {offer.line.run}; since then:")
        print_lines("\n".join(f"  {difference_text(offer.node, each)}" for each in offer.changes))
    subject = "Is the artifact" if len(found) == 1 else f"Are these {len(found)} artifacts"
    if not options.yes and not _confirm(f"{subject} still valid with this code? [y/N] "):
        print_lines("nothing was accepted")
        return FAILED
    records: dict[Path, Record] = {}
    for offer in found:
        record, outcome = keep_valid(store, planner, offer, options.reason)
        print_lines(f"{offer.node}: {outcome}")
        records |= {record.folder: record} if record is not None else {}
    for warning in filter(None, (_send(store, record) for record in records.values())):
        print_lines(f"dflow: {warning}", error=True)
    return OK


def _confirm(question: str) -> bool:
    print(question, end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _send(store: Store, record: Record) -> str | None:
    """Send a user's acceptance of an artifact to MLflow; a run in progress sends it itself. Returns a warning on
    failure.
    """
    if not is_tracked(record):
        return None
    try:
        record.lock()
    except StoreError:
        return None
    try:
        return send_rest(store.path, record.folder)[0]
    finally:
        record.unlock()
