"""`dflow status`: show a run."""

from __future__ import annotations

import argparse
import json

from executor.commands.arguments import add_json, add_run, add_store
from executor.exits import OK
from executor.explain_text import accepted_text
from executor.lines import print_lines
from executor.record import find_record, mlflow_ids
from executor.results import print_results
from executor.store import Store, store_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_json(parser)
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    store = Store.open(store_path(options.store, None), write=False)
    record = find_record(store.records, options.run)
    state = record.state
    if state.status == "running" and not record.is_alive():
        state.status = "stopped"
        for node in state.nodes.values():
            node.state = "pending" if node.state == "running" else node.state
    if options.json:
        mlflow = mlflow_ids(store.records, record)
        graph = record.graph()
        nodes = [
            {
                "id": node_id,
                "op": graph.nodes[node_id].op.name,
                "key": node.key,
                "digest": node.digest,
                "state": node.state,
                "cache": node.cache,
                "acceptance": node.acceptance,
                "reason": node.error or node.reason,
                "seconds": node.seconds,
                "mlflow_run_id": mlflow["nodes"].get(node_id),
                "metrics": node.metrics,
            }
            for node_id, node in state.nodes.items()
        ]
        whole = {
            "run": state.run,
            "pipeline": state.pipeline,
            "status": state.status,
            "mlflow_run_id": mlflow["parent"],
        }
        print_lines(json.dumps({**whole, "nodes": nodes}, indent=1))
        return OK
    print_results(state, record.graph().result_nodes)
    for node_id, node in state.nodes.items():
        line = store.newest(node.key) if node.acceptance == "accepted" and node.key is not None else None
        if line is not None:
            print_lines(f"{node_id}: {accepted_text(line.user, line.time, line.reason)}")
    print_lines(f"run {state.run}: {state.status}")
    return OK
