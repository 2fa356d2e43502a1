"""`dflow explain`: say why a node would run."""

from __future__ import annotations

import argparse

from dsl.errors import did_you_mean
from dsl.read_toml import read_graph
from executor.begin import make_planner
from executor.commands.arguments import add_file, add_overrides, add_store
from executor.exits import OK, USAGE
from executor.lines import print_lines
from executor.plan_rows import plan_rows
from executor.store import Store, store_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_overrides(parser)
    parser.add_argument("node", metavar="NODE")
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    graph = read_graph(options.file, options.set)
    store = Store.open(store_path(options.store, options.file), write=False)
    rows = {row["id"]: row for row in plan_rows(graph, make_planner(store, graph).plan())}
    if options.node not in rows:
        hint = did_you_mean(options.node, list(rows)) or f"nodes: {', '.join(rows)}"
        print_lines(f'there is no node "{options.node}" ({hint})', error=True)
        return USAGE
    row = rows[options.node]
    if row["cache"] == "hit":
        print_lines(f"{options.node}: cached as {row['digest']}")
        return OK
    print_lines(f"{options.node} {'may run' if row['cache'] == 'maybe' else 'runs'}:")
    for reason in row["reason"].split("; "):
        print_lines(f"  {reason}")
    return OK
