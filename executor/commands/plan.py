"""`dflow plan`: show what would run, and why."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dsl.edge_checks import Absent
from dsl.graph import Graph
from dsl.os_errors import free_bytes
from dsl.read_toml import read_graph
from executor.commands.arguments import (
    add_file,
    add_json,
    add_overrides,
    add_ray,
    add_selection,
    add_store,
    add_sweeps,
    open_store,
)
from executor.launchers.cluster_address import use_cluster
from executor.planning.history import PreviousNodes
from executor.planning.plan_text import plan_rows, print_estimates, print_plan
from executor.planning.planner import earlier_rule_note
from executor.planning.preflight import preflight
from executor.planning.selection import missing_data, require_others, selected
from executor.planning.session import make_planner
from executor.system.output import OK, USAGE, print_json, print_lines

if TYPE_CHECKING:
    from dsl.estimate import Estimate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_overrides(parser)
    add_sweeps(parser)
    add_selection(parser)
    add_json(parser)
    add_store(parser)
    add_ray(parser)


def main(options: argparse.Namespace) -> int:
    use_cluster(options.ray)
    absent: Absent = {}
    graph, only = selected(read_graph(options.file, options.set, options.sweep, absent), options.to, options.only)
    store = open_store(options)
    decisions = make_planner(store, graph, absent=absent).plan()
    absent_inputs = missing_data(decisions, absent)
    free_disk = free_bytes(store.path)
    lacking, estimates = preflight(store, graph, decisions, free_disk)
    missing = list(dict.fromkeys(str(each) for each in [*absent_inputs, *lacking]))
    require_others(decisions, only)
    decisions = {node_id: each for node_id, each in decisions.items() if not only or node_id in only}
    needs: dict[str, Estimate] = {}
    measured: dict[str, int | None] = {}
    does_not_fit: list[str] = []
    history = PreviousNodes(store, graph.name)
    if estimates is not None and any(decision.cache != "hit" for decision in decisions.values()):
        needs = {node_id: need for node_id, need in estimates.needs.items() if node_id not in absent}
        measured, does_not_fit = _memory(graph, needs, history)
    cluster = _cluster_lines(graph)
    if options.json:
        from executor.planning.estimates import estimate_row

        sizes = {node_id: estimate_row(need, measured.get(node_id)) for node_id, need in needs.items()}
        rows = plan_rows(graph, decisions, history.computed)
        plan = {"pipeline": graph.name, "nodes": rows, "resources": sizes, "free_disk": free_disk}
        print_json({**plan, "missing_here": missing, "does_not_fit": does_not_fit, "cluster": cluster})
    else:
        print_plan(graph, decisions, missing, earlier_rule_note(decisions, str(options.file)))
        print_estimates(graph, needs, measured, free_disk, store.path)
        for line in [*does_not_fit, *cluster]:
            print_lines(line)
    return USAGE if missing else OK


def _memory(
    graph: Graph, needs: Mapping[str, Estimate], history: PreviousNodes
) -> tuple[dict[str, int | None], list[str]]:
    """What a rank of each node took when it ran last, and the nodes that do not fit on this machine."""
    from executor.planning.estimates import measured_memory, too_large
    from executor.system.hardware import gpu_memory, machine_memory

    measured = {
        node_id: measured_memory(graph.nodes[node_id], history.computed(node_id))
        for node_id, need in needs.items()
        if need.memory or need.disk
    }
    return measured, too_large(graph, needs, gpu_memory, graph.machine.memory_bytes or machine_memory(), measured)


def _cluster_lines(graph: Graph) -> list[str]:
    """A line on each cluster that nodes use."""
    elsewhere = [node.launch for node in graph.nodes.values() if node.launch.kind == "ray"]
    if not elsewhere:  # the usual case: no module that runs stages is imported
        return []
    from executor.launchers.backends import Backends

    return Backends(graph.machine).describe(elsewhere)
