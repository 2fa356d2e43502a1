"""`dflow status`: show a run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from attrs import evolve

from dsl.convert import structure
from dsl.errors import ClusterError, DflowError, NotTrusted, StoreError
from dsl.files import known_fields
from dsl.graph import Graph
from dsl.launch import OWN_CLUSTER, Launch, Machine
from executor.commands.arguments import add_json, add_ray, add_run, add_store, open_store
from executor.launchers.cluster_address import cluster_address, recorded_machine, use_cluster
from executor.planning.explanation import accepted_text
from executor.records.events import read_events
from executor.records.graph_file import GRAPH, recorded_nodes, recorded_table
from executor.records.run_list import newer_smoke_run, running_runs
from executor.records.run_record import NodeState, Record, find_record
from executor.results.run_table import Live, failures_text, first_line, print_results
from executor.store.artifact_store import Store
from executor.system.output import OK, columns, print_json, print_lines, shown_duration
from executor.tracking.sync_state import sent_of

UNFINISHED = ("killed", "stopped")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--paths", action="store_true", help="print only the folder of each node's artifact")
    add_json(parser)
    add_store(parser)
    add_ray(parser)


def main(options: argparse.Namespace) -> int:
    use_cluster(options.ray)
    store = open_store(options)
    smoke = newer_smoke_run(store, "status") if options.run is None else ""
    try:
        record = find_record(store.records, options.run)
    except StoreError as error:
        if not smoke:
            raise
        raise StoreError(f"{error}; {smoke}") from None
    state = record.state
    state.status = record.status()
    live = _live_metrics(record)
    for node in state.nodes.values():
        node.state = "pending" if node.state == "running" and state.status != "running" else node.state
    if options.paths:
        rows = [(node_id, _path(store, node) or f"none: {node.state}") for node_id, node in state.nodes.items()]
        print_lines(columns(("node", "folder"), rows))
        return OK
    if options.json:
        print_json(_to_json(store, record, live))
        return OK
    failures = failures_text(state)
    for node_id, current in live.items():
        _show_progress(state.nodes[node_id], current)
    print_results(state, state.result_nodes, graph=None if state.status == "running" else _swept_graph(record))
    if failures:
        print_lines(failures)
    for node_id, node in state.nodes.items():
        line = store.newest(node.key) if node.acceptance == "accepted" and node.key is not None else None
        if line is not None:
            print_lines(f"{node_id}: {accepted_text(line.user, line.time, line.reason)}")
    next_step = f"; resume with: dflow resume {state.run}" if state.status in UNFINISHED else ""
    print_lines(f"run {state.run}: {state.status}, {shown_duration(record.seconds())}{next_step}")
    for each in _cluster_lines(record) if state.status == "running" else ():
        print_lines(each)
    for other in running_runs(store.records) if options.run is None else ():
        if other.run != record.run:
            print_lines(f"run {other.run} of {other.state.pipeline} is also running: dflow status {other.run}")
    if smoke:
        print_lines(smoke)
    return OK


def _live_metrics(record: Record) -> dict[str, Live]:
    """Progress and metrics of the nodes that run, or began and are not done; in the order of the graph."""
    nodes = record.state.nodes.items()
    begun = {
        node_id: (node.attempt, Live())
        for node_id, node in nodes
        if node.state == "running" or (node.attempt and node.state != "done")
    }
    for event in read_events(record.events_path) if begun else ():
        attempt, live = begun.get(event.node, (None, Live()))
        if event.attempt == attempt:
            live.add(event)
    return {node_id: live for node_id, (_, live) in begun.items()}


def _show_progress(node: NodeState, live: Live) -> None:
    """Put the node's progress into its row of the table, or after its end how far it came, and why it ended."""
    if node.state == "running":
        node.reason = str(live) or "running"
    elif reached := live.reached_with_metrics:
        if node.failure is not None:
            node.failure = evolve(node.failure, what=f"{first_line(node.failure.what)}; it reached {reached}")
        else:
            node.reason = f"reached {reached}"


def _cluster_lines(record: Record) -> list[str]:
    """A line on the Ray cluster that the run's nodes use; none for dflow's own cluster, which only the run can use."""
    nodes = recorded_nodes(record.folder).values()
    elsewhere = [
        launch for node in nodes if (launch := structure(Launch, known_fields(Launch, node.launch))).kind == "ray"
    ]
    recorded = recorded_table(record.folder, GRAPH).get("machine", {})
    machine = structure(Machine, known_fields(Machine, recorded))
    if not elsewhere or cluster_address(machine) == OWN_CLUSTER:
        return []
    try:
        machine = recorded_machine(machine)
    except ClusterError as error:
        return [str(error)]
    from executor.launchers.backends import Backends

    return Backends(machine).describe(elsewhere)


def _swept_graph(record: Record) -> Graph | None:
    """The graph of a run that is a sweep; None for any other run, or where its ops no longer load."""
    try:
        is_swept = any(node.copy is not None for node in recorded_nodes(record.folder).values())
        return record.graph() if is_swept else None
    except NotTrusted as error:
        print_lines(f"no combinations: {error}", error=True)
    except DflowError:
        pass
    return None


def _path(store: Store, node: NodeState) -> str | None:
    """The folder of the node's artifact; None where there is none."""
    if node.digest is None or not store.has(node.digest):
        return None
    return str(store.object_path(node.digest).resolve())


def _to_json(store: Store, record: Record, live: Mapping[str, Live]) -> dict[str, Any]:
    """The run as JSON for `dflow status`; running nodes have their current metrics and progress."""
    state = record.state
    sent = sent_of(record)
    ops = record.op_names()
    nodes: list[dict[str, Any]] = [
        {
            "id": node_id,
            "op": ops.get(node_id),
            "key": node.key,
            "digest": node.digest,
            "path": _path(store, node),
            "state": node.state,
            "cache": node.cache,
            "acceptance": node.acceptance,
            "reason": node.error or node.reason,
            "advice": node.failure.advice if node.failure is not None else "",
            "seconds": node.seconds,
            "mlflow_run_id": sent.run_id(node_id),
            "metrics": node.metrics,
        }
        for node_id, node in state.nodes.items()
    ]
    for row in nodes:
        if row["id"] in live:
            current = live[row["id"]]
            row |= {"metrics": current.metrics, "progress": {"done": current.done, "total": current.total}}
    return {
        "run": state.run,
        "pipeline": state.pipeline,
        "status": state.status,
        "seconds": record.seconds(),
        "mlflow_run_id": sent.parent or None,
        "nodes": nodes,
    }
