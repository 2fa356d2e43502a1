"""Takes a planned run to its end: at once where everything is there, else with what it takes to run stages.

Nothing that a run in which nothing is to be done can do without is loaded here.
"""

from __future__ import annotations

import time

from executor.planning.session import Session
from executor.records.results_run import results_run
from executor.records.run_record import mlflow_ids
from executor.results.run_table import print_figures
from executor.system.exits import OK
from executor.system.output import print_lines
from executor.tracking.sync_state import lacks


def start(session: Session, *, adopt: bool = False, keep_going: bool = False) -> int:
    """The exit code, see `executor.scheduler.run_loop.run_session`."""
    if session.is_complete and _is_closed(session):
        _tell(session)
        return OK
    from executor.scheduler.run_outcome import run_and_tell

    return run_and_tell(session, adopt=adopt, keep_going=keep_going)


def _is_closed(session: Session) -> bool:
    """Put down that the run is done, unless MLflow lacks something of it: it has to be sent then."""
    record = session.record
    state = record.state
    before = state.status
    state.status, state.ended, state.results_run = "done", time.time(), results_run(record, session.graph)
    if lacks(record):
        state.status, state.ended = before, None
        return False
    record.save()
    record.unlock()
    return True


def _tell(session: Session) -> None:
    record = session.record
    state = record.state
    is_own = state.results_run == record.run
    number = "the only node is" if len(state.nodes) == 1 else f"all {len(state.nodes)} nodes are"
    print_lines(
        f"run {record.run} is complete: nothing to do" if session.is_resumed else f"nothing to do: {number} cached"
    )
    print_figures(state, state.result_nodes, graph=session.graph)
    parent = mlflow_ids(session.store.records, record)["parent"]
    where = f"; results in MLflow run {parent}" if parent else ""
    source = "" if is_own or state.results_run is None else f", its results are those of run {state.results_run}"
    print_lines(f"run {record.run} is done{source}{where}")
