"""Runs a session and tells the user how it ended."""

from __future__ import annotations

from executor.begin import Session
from executor.display import make_display
from executor.exits import FAILED, OK
from executor.lines import print_lines
from executor.record import RunState, mlflow_ids
from executor.results import print_results
from executor.run import NOT_RUN, run_session


def run_and_tell(session: Session, *, adopt: bool = False, keep_going: bool = False) -> int:
    record = session.record
    code = run_session(session, make_display(record.state), adopt=adopt, keep_going=keep_going)
    print_results(record.state, session.graph.result_nodes)
    if code == OK:
        parent = mlflow_ids(session.store.records, record)["parent"]
        where = f"; results in MLflow run {parent}" if parent else ""
        print_lines(f"run {record.run} is done{where}")
    elif code == FAILED:
        _print_failures(record.state)
        print_lines(
            f"run {record.run} failed; after a fix of code or data: dflow resume {record.run}; "
            "after a change of the pipeline file: dflow run FILE",
            error=True,
        )
    else:
        print_lines(f"run {record.run} was stopped; go on with: dflow resume {record.run}", error=True)
    return code


def _print_failures(state: RunState) -> None:
    """All of them once more, where there are several or where others could not run for them."""
    failed = [f"{node_id} failed: {node.error}" for node_id, node in state.nodes.items() if node.state == "failed"]
    not_run = [f"{node_id}: {node.reason}" for node_id, node in state.nodes.items() if node.reason.startswith(NOT_RUN)]
    if len(failed) > 1 or not_run:
        print_lines("\n".join([*failed, *not_run]), error=True)
