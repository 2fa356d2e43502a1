"""The description of a run in MLflow: how it ended, its main figures, and where its report is. Markdown.

MLflow's page loads the images of a description from anywhere. Names and values that ops made of data are plain text in
it, and notes, which may be those of a received record, have links in place of images.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dsl.graph import Graph
from executor.records.run_record import NodeState, Record, RunState
from executor.results.run_table import result_rows
from executor.results.sweep import Combination, combinations, final_metrics, main_metrics, sorted_rows, sweep_cells
from executor.system.output import shown_duration
from executor.system.user_cache import user_name
from executor.tracking.sync_state import REPORT, TRAINING

MOST_ROWS = 30
IMAGE = re.compile(r"!+(?=\[)")
TAG = re.compile("<(?=[A-Za-z/!?])")
SPECIAL = re.compile(r"[\\|`]|!(?=\[)|\](?=[(\[])")  # an interval, [1, 2], stays as it is


def run_name(state: RunState) -> str:
    """The name of the whole run in MLflow, to which nested runs append.

    MLflow cuts long names, so the part that tells runs apart comes first. The pipeline is left out if the experiment
    has its name.
    """
    names = [state.name, state.run, "" if state.experiment == state.pipeline else state.pipeline]
    return " ".join(name for name in names if name)


def maker_tags(state: RunState, name: str) -> dict[str, str]:
    """The name, source and user that MLflow's tables show of a run."""
    return {
        "mlflow.runName": name,
        "mlflow.source.name": f"dflow: {state.pipeline}",
        "mlflow.source.type": "LOCAL",
        "mlflow.user": user_name(),
    }


def run_note(record: Record, graph: Graph, experiment: str, parent: str) -> str:
    """The description in MLflow of a run that has ended, beginning with the user's notes."""
    state = record.state
    parts = [shown_notes(graph), f"{_ending(state, record.seconds())}. {_link(experiment, parent)}"]
    unswept = [graph.nodes[node_id] for node_id in graph.result_nodes if graph.nodes[node_id].copy is None]
    parts.append(_figures(final_metrics(unswept, state.nodes), graph))
    parts.append(_combinations(graph, state.nodes))
    return "\n\n".join(part for part in parts if part)


def shown_notes(graph: Graph) -> str:
    """The user's notes without images and HTML."""
    return TAG.sub("&lt;", IMAGE.sub("", graph.notes))


def combination_note(combination: Combination, state: RunState, graph: Graph, experiment: str, parent: str) -> str:
    """The description in MLflow of a combination that has ended."""
    figures = final_metrics(combination.result_nodes(graph), state.nodes)
    shown = _figures(figures, graph)
    ending = f"One combination of run {_plain(state.run)}{_plain(_open(combination, state))}"
    return "\n\n".join(part for part in (f"{ending}. {_link(experiment, parent)}", shown) if part)


def _open(combination: Combination, state: RunState) -> str:
    """A text that lists the unfinished nodes of a combination, and why they are not done."""
    nodes = {node.id: state.nodes[node.id] for node in combination.nodes}
    failed = [node_id for node_id, node in nodes.items() if node.state == "failed"]
    blocked = {node_id: node.reason for node_id, node in nodes.items() if node.is_blocked}
    rest = [node_id for node_id, node in nodes.items() if node.state != "done" and node_id not in {*failed, *blocked}]
    parts = [f"failed: {', '.join(failed)}"] if failed else []
    parts += [f"{node_id} {reason}" for node_id, reason in blocked.items()]
    parts += [f"not done in a {_ended_status(state)} run: {', '.join(rest)}"] if rest else []
    return f"; {'; '.join(parts)}" if parts else ""


def _ended_status(state: RunState) -> str:
    """The status of a run that has ended; "killed" if it is recorded as running."""
    return "killed" if state.status == "running" else state.status


def _ending(state: RunState, seconds: float) -> str:
    nodes = state.nodes.values()
    cached = sum(node.cache == "hit" for node in nodes)
    failed = [node_id for node_id, node in state.nodes.items() if node.state == "failed"]
    parts = [
        f"{len(state.nodes)} nodes, {cached} of them cached",
        *([_plain(f"failed: {', '.join(failed)}")] if failed else []),
    ]
    return f"**{_ended_status(state)}** after {shown_duration(seconds)}: {'; '.join(parts)}"


def _link(experiment: str, parent: str) -> str:
    return f"[Report](#/experiments/{experiment}/runs/{parent}/artifacts/{REPORT}?{TRAINING})"


def _figures(found: Mapping[str, tuple[str, float]], graph: Graph) -> str:
    """A table of the main metrics in Markdown. found: from `final_metrics`."""
    main = main_metrics(graph, found)
    return _table(("metric", "value", "interval"), result_rows(main, graph.judged_by)) if main else ""


def _combinations(graph: Graph, states: Mapping[str, NodeState]) -> str:
    """A table of a sweep's combinations in Markdown, the best first."""
    found = combinations(graph)
    if not found:
        return ""
    rows, sort_by = sorted_rows(graph, states, found)
    header, table, _ = sweep_cells(graph, rows, sort_by, has_state=True)
    more = f"\n\nand {len(table) - MOST_ROWS} more" if len(table) > MOST_ROWS else ""
    return _table(header, table[:MOST_ROWS]) + more


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [[_plain(cell) for cell in line] for line in (head, *rows)]
    lines.insert(1, ["---"] * len(head))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """The text as one line of Markdown, with links, images and HTML made harmless."""
    return SPECIAL.sub(r"\\\g<0>", " ".join(text.split())).replace("<", "&lt;")
