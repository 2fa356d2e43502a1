"""Completes a planned run and reports how it ended: at once if everything is cached, else by the run loop.

The run loop and the modules that run stages are imported only if a stage may run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from executor.planning.session import Session
from executor.records.run_record import StartedBy
from executor.results.run_table import print_figures, print_results
from executor.system.output import FAILED, OK, print_lines
from executor.tracking.sync_state import lacks, sent_of

# After a failure where a resume does not help, by the command that started the run.
OTHERWISE: Mapping[StartedBy, str] = {
    "run": "after a change of the pipeline file: dflow run FILE",
    "evaluate": "with other arguments: dflow evaluate DRAFT --target TARGET",
}


def run_and_report(
    session: Session,
    *,
    adopt: bool = False,
    keep_going: bool = False,
    verify_inputs: bool = False,
    again: str = "",
) -> int:
    """Run a session and print its report. Returns the exit code of `run_session`.

    again: the command that the user typed, if it reads the pipeline file.
    """
    for note in session.notes:
        print_lines(note)
    if session.is_complete and _close(session):
        _report_complete(session)
        return OK
    from executor.scheduler.plain_display import make_display
    from executor.scheduler.run_loop import run_session

    record = session.record
    display = make_display(record.state)
    code = run_session(session, display, adopt=adopt, keep_going=keep_going, verify_inputs=verify_inputs)
    print_results(record.state, session.graph.result_nodes, session.graph, display.warned)
    if code == OK:
        print_lines(f"run {record.run} is done{_where(session)}")
    elif code == FAILED:
        print_lines(
            f"run {record.run} failed; after a fix of code or data: dflow resume {record.run}; "
            + (f"after a change of the pipeline file: {again}" if again else OTHERWISE[record.state.started_by]),
            error=True,
        )
    else:
        print_lines(f"run {record.run} was stopped; resume with: dflow resume {record.run}", error=True)
    for text in display.last:
        print_lines(text)
    return code


def _close(session: Session) -> bool:
    """Record that the run is done, unless MLflow must be sent something first. Returns whether it is recorded."""
    record = session.record
    state = record.state
    is_new = state.status != "done"
    if is_new:
        state.status, state.ended, state.results_run = "done", time.time(), record.find_results_run(session.graph)
    if lacks(record):
        state.status, state.ended = "running", None
        return False
    if is_new:
        record.save()
    record.unlock()
    return True


def _report_complete(session: Session) -> None:
    record = session.record
    state = record.state
    is_own = state.results_run == record.run
    number = "the only node is" if len(state.nodes) == 1 else f"all {len(state.nodes)} nodes are"
    print_lines(
        f"run {record.run} is complete: nothing to do" if session.is_resumed else f"nothing to do: {number} cached"
    )
    print_figures(state, state.result_nodes, graph=session.graph)
    source = "" if is_own or state.results_run is None else f", its results are those of run {state.results_run}"
    print_lines(f"run {record.run} is done{source}{_where(session)}")


def _where(session: Session) -> str:
    parent = sent_of(session.record).parent
    return f"; results in MLflow run {parent}" if parent else ""
