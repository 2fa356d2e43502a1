"""`dflow run`: run what is stale in a pipeline."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import attrs

from dsl.check import Absent, absolute_path, all_of
from dsl.errors import PipelineError
from dsl.finding import Finding
from dsl.graph import Graph
from dsl.read_toml import read_graph
from executor.commands.arguments import (
    add_execution,
    add_file,
    add_overrides,
    add_ray,
    add_selection,
    add_store,
    add_trust,
    check_store,
    store_of,
)
from executor.launchers.cluster_address import use_cluster, with_cluster
from executor.planning.session import new_run, selected
from executor.scheduler.run_and_report import run_and_report
from executor.store.artifact_store import Store, store_path
from executor.system.output import print_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_overrides(parser)
    add_selection(parser)
    parser.add_argument(
        "--sort",
        metavar="METRIC",
        help="sort the table of a sweep by this metric, descending; --sort=-METRIC: ascending",
    )
    add_execution(parser)
    parser.add_argument("--name", default="", metavar="TEXT", help="what `dflow runs` and MLflow call this run")
    add_store(parser)
    add_trust(parser)
    add_ray(parser)
    parser.add_argument(
        "--smoke",
        type=int,
        metavar="N",
        help="run the whole pipeline on N samples, in a store of its own, and estimate the full run",
    )


def main(options: argparse.Namespace) -> int:
    use_cluster(options.ray)
    absent: Absent = {}
    graph, only = selected(read_graph(options.file, options.set, options.sweep, absent), options.to, options.only)
    if absent and options.smoke is not None:
        raise PipelineError(all_of(absent))
    if options.sort is not None:
        graph = _sorted_by(graph, options.sort)
    if graph.sort_by:
        from executor.results.sweep import sort_warning

        if warning := sort_warning(graph):
            print_lines(f"warning: {warning}", error=True)
    path = store_of(options)
    check_store(options, path)
    if path != store_path(options.store, None):
        print_lines(
            f"the store is {path}: give other commands --store {shlex.quote(str(path))}, or use them in its folder"
        )
    file = str(absolute_path(options.file, Path.cwd()))
    if options.smoke is not None:
        from executor.smoke.trial_run import smoke_run

        return smoke_run(path, graph, options.smoke, file)
    store = Store.open(path, write=True)
    session = new_run(
        store, with_cluster(graph), only, absent=absent, file=file, name=options.name, overrides=options.set
    )
    again = f"dflow {shlex.join(options.given)}"
    return run_and_report(session, keep_going=options.keep_going, verify_inputs=options.verify_inputs, again=again)


def _sorted_by(graph: Graph, metric: str) -> Graph:
    """The graph with its sweep sorted by a metric. Raises PipelineError for a graph that is no sweep."""
    if all(node.copy is None for node in graph.nodes.values()):
        message = f"--sort {metric}: there is no table to sort, since no selected node is swept"
        raise PipelineError([Finding(message, advice="--sweep node.field=[value, value] copies nodes")])
    return attrs.evolve(graph, sort_by=metric)
