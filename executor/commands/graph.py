"""`dflow graph`: draw the nodes of a pipeline, what reads from what, and what would run."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from dsl.check import Absent
from dsl.errors import DflowError
from dsl.graph import Graph
from dsl.read_toml import read_graph
from executor.commands.arguments import add_file, add_json, add_overrides, add_store, add_sweeps, open_store
from executor.planning.planner import WORDS
from executor.planning.session import make_planner
from executor.report.graph_text import dot, drawn_graph, levels
from executor.system.output import OK, print_json, print_lines, write_on

PICTURES = (".png", ".svg", ".pdf")
COLOURS = {"cached": "32", "runs": "33", "may be cut off": "36"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_overrides(parser)
    add_sweeps(parser)
    parser.add_argument("--dot", action="store_true", help="in Graphviz's format")
    parser.add_argument("--picture", type=Path, metavar="FILE", help=f"write a picture: {', '.join(PICTURES)}")
    add_json(parser)
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    if options.picture is not None and options.picture.suffix.lower() not in PICTURES:
        raise DflowError(f"{options.picture}: the name of a picture must end in {', '.join(PICTURES)}")
    absent: Absent = {}
    graph = read_graph(options.file, options.set, options.sweep, absent)
    store = open_store(options)
    decisions = make_planner(store, graph, absent=absent).plan()
    states = {node_id: WORDS[decision.cache] for node_id, decision in decisions.items()}
    if options.picture is not None:
        from executor.report.pictures import save_graph  # loads matplotlib

        save_graph(graph, states, options.picture)
    if options.json:
        print_json(_rows(graph, states))
    elif options.dot:
        print_lines(dot(graph, states))
    elif options.picture is None:
        write_on(sys.stdout, f"{_coloured(drawn_graph(graph, states))}\n")
    return OK


def _rows(graph: Graph, states: Mapping[str, str]) -> dict[str, object]:
    level = levels({node.id: node.parents for node in graph.nodes.values()})
    nodes = [
        {
            "id": node.id,
            "op": node.op.name,
            "level": level[node.id],
            "state": states[node.id],
            "inputs": {edge: list(ids) for edge, ids in node.inputs.items()},
        }
        for node in graph.nodes.values()
    ]
    return {"pipeline": graph.name, "nodes": nodes}


def _coloured(text: str) -> str:
    """Colour the states, only on a terminal. States are columns between blanks."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    state = re.compile(rf"(?<=  )(?:{'|'.join(COLOURS)})(?=  |$)", re.MULTILINE)
    return state.sub(lambda found: f"\x1b[{COLOURS[found[0]]}m{found[0]}\x1b[0m", text)
