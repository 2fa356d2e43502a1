"""`dflow compare-backends`: capture a few samples with transformers and with SGLang, and compare."""

from __future__ import annotations

import argparse

from dsl.read_toml import read_graph
from executor.commands.arguments import add_file, add_json, add_overrides, add_store, add_trust, check_store, open_store
from executor.model_tools.compare_backends import compare
from executor.system.output import FAILED, OK, print_json, print_lines
from ops.tools.compare_backends.text import comparison_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_overrides(parser)
    parser.add_argument("--node", metavar="NODE", help="the capture node; default: all of them")
    parser.add_argument("--samples", type=int, default=8, metavar="N", help="number of samples; default: 8")
    add_json(parser)
    add_store(parser)
    add_trust(parser)


def main(options: argparse.Namespace) -> int:
    """Exit code 1 where the backends disagree."""
    graph = read_graph(options.file, options.set)
    store = open_store(options)
    check_store(options, store.path)
    compared = compare(store, graph, options.node, options.samples)
    if options.json:
        print_json({"nodes": compared})
    else:
        for each in compared:
            print_lines(comparison_text(each))
    return OK if all(each["agree"] for each in compared) else FAILED
