"""Runs a session and tells the user how it ended."""

from __future__ import annotations

from executor.planning.session import Session
from executor.records.run_record import mlflow_ids
from executor.results.run_table import print_results
from executor.scheduler.plain_display import make_display
from executor.scheduler.run_loop import run_session
from executor.system.exits import FAILED, OK
from executor.system.output import print_lines


def run_and_tell(session: Session, *, adopt: bool = False, keep_going: bool = False) -> int:
    record = session.record
    display = make_display(record.state)
    code = run_session(session, display, adopt=adopt, keep_going=keep_going)
    print_results(record.state, session.graph.result_nodes, session.graph)
    if code == OK:
        parent = mlflow_ids(session.store.records, record)["parent"]
        where = f"; results in MLflow run {parent}" if parent else ""
        print_lines(f"run {record.run} is done{where}")
    elif code == FAILED:
        print_lines(
            f"run {record.run} failed; after a fix of code or data: dflow resume {record.run}; "
            "after a change of the pipeline file: dflow run FILE",
            error=True,
        )
    else:
        print_lines(f"run {record.run} was stopped; go on with: dflow resume {record.run}", error=True)
    for text in display.last:
        print_lines(text)
    return code
