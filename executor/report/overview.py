"""The runs of a report, and what a reader should know before anything else: what goes on, failed, or is gone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from executor.maintenance.disk_use import shown_size
from executor.report.graph_svg import shown_state
from executor.report.markup import Markup, element, joined, shown_duration, table
from executor.report.run_data import RunFacts
from executor.results.run_table import first_line
from executor.system.output import moment

STATUS_CLASS = {"done": "good", "failed": "bad", "killed": "bad", "stopped": "warn", "running": "warn"}
MOST_NAMED = 12


def overview(runs: Sequence[RunFacts]) -> Markup:
    """A column for each run, then one line for each thing that is not as it should be."""
    facts = [_facts(run) for run in runs]
    rows = [[name, *(of_run[name] for of_run in facts)] for name in facts[0]]
    notices = [element("li", each, class_="notice") for run in runs for each in _notices(run, len(runs) > 1)]
    shown = table(["run", *map(run_name, runs)] if len(runs) > 1 else ("", ""), rows)
    return joined([shown, element("ul", *notices) if notices else ""])


def run_name(run: RunFacts, label: str | None = None) -> Markup:
    """The label beside the colour that the run has in all charts."""
    dot = element("i", class_="dot", style=f"background: var(--series-{run.place % 8})")
    return element("span", dot, run.label if label is None else label)


def _facts(run: RunFacts) -> dict[str, object]:
    nodes = list(run.nodes.values())
    states = [shown_state(node) for node in nodes]
    state = run.record.state
    sizes = {node.recorded.digest: node.size for node in nodes if node.size is not None}
    return {
        "id": run.run,
        "status": element("span", run.status, class_=f"mark {STATUS_CLASS.get(run.status, '')}"),
        "pipeline": state.pipeline,
        "started": moment(state.started),
        "took": None if run.worked is None else shown_duration(run.worked),
        "nodes": f"{states.count('done')} computed, {states.count('cached')} cached, {len(states)} in all",
        "artifacts": shown_size(sum(sizes.values())),
        "tags": ", ".join(run.tags) or None,
    }


def _notices(run: RunFacts, is_named: bool) -> Iterable[str]:
    head = f"{run.label}: " if is_named else ""
    go_on = f"go on with: dflow resume {run.run}"
    if run.status == "running":
        yield f"{head}the run is still going; what it has not done yet is missing here"
    elif run.status == "killed":
        yield f"{head}the run was killed; {go_on}"
    elif run.status == "stopped":
        yield f"{head}the run was stopped; {go_on}"
    for node in run.nodes.values():
        if node.recorded.state == "failed":
            yield f"{head}{node.id} failed: {first_line(node.recorded.error or 'no reason is recorded')}"
    gone = [node.id for node in run.nodes.values() if node.is_gone]
    if gone:
        named = ", ".join(gone[:MOST_NAMED]) + (" ..." if len(gone) > MOST_NAMED else "")
        yield (
            f"{head}the store no longer holds {len(gone)} of the artifacts ({named}): they were collected or damaged; "
            "their figures are from the record, what they would show themselves is missing"
        )
    for damage in run.damage:
        yield f"{head}{damage}"
