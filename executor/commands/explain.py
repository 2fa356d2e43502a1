"""`dflow explain`: say why a node would run, or where its artifact came from."""

from __future__ import annotations

import argparse

from dsl.check import Absent
from dsl.errors import PipelineError
from dsl.read_toml import read_graph
from executor.commands.arguments import add_file, add_json, add_overrides, add_store, add_sweeps, open_store
from executor.explain.explanation import explain, explanation_text
from executor.planning.selection import missing_data, require_node
from executor.planning.session import make_planner
from executor.system.output import OK, print_json, print_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_overrides(parser)
    add_sweeps(parser)
    parser.add_argument("node", metavar="NODE")
    add_json(parser)
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    absent: Absent = {}
    graph = read_graph(options.file, options.set, options.sweep, absent)
    store = open_store(options)
    require_node(graph, options.node)
    planner = make_planner(store, graph, absent=absent)
    if missing := missing_data(planner.plan(), absent):
        raise PipelineError(missing)
    explanations = explain(store, planner, options.node)
    if options.json:
        first, *above = [each.to_json() for each in explanations]
        print_json({**first, "above": above})
    else:
        print_lines(explanation_text(explanations))
    return OK
