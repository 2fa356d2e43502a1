"""The run whose draft `dflow serve` and `dflow diagnose` use where none is named."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dsl.errors import DflowError
from dsl.graph import Graph
from dsl.op import Artifact
from executor.records.run_record import Record, find_record, newest_that_ran

DEFAULT_RUN = "the newest with a finished draft"


def find_draft_run(
    records: Path, run: str | None, node: str | None, outputs: Iterable[type[Artifact]]
) -> tuple[Record, str]:
    """The record, and a note where it is not the latest.

    run: see `find_record`. None: the newest run in which a node with one of the outputs is done, the named one where
    node is not None; the latest where no run has one, or the latest cannot be read without the user's trust. Raises
    StoreError.
    """
    latest = find_record(records, run)
    wanted = tuple(outputs)
    if run is not None:
        return latest, ""
    try:
        if _has(latest, latest.graph(), node, wanted):
            return latest, ""
    except DflowError:
        return latest, ""
    for record in newest_that_ran(records):
        with suppress(DflowError):
            if record.run < latest.run and _has(record, record.graph(), node, wanted):
                what = "has no finished draft" if node is None else f'has no finished draft of "{node}"'
                used = f"run {record.run} of {record.state.pipeline} is used"
                return record, f"the latest run, {latest.run} of {latest.state.pipeline}, {what}; {used}"
    return latest, ""


def _has(record: Record, graph: Graph, named: str | None, wanted: tuple[type[Artifact], ...]) -> bool:
    return any(
        node.op.output in wanted and named in (None, node.id) and record.state.nodes[node.id].state == "done"
        for node in graph.nodes.values()
    )
