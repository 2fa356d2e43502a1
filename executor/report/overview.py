"""The runs and their nodes: a summary, the graph, time, memory and disk of each node, warnings and errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import evolve
from markupsafe import Markup

from dsl.finding import block, for_run, line
from dsl.sizes import shown_bytes
from executor.report.pictures import embedded, graph_figure, shown_name
from executor.report.run_data import NodeFacts, RunFacts
from executor.report.templates import faint, joined, mark, render, run_columns, table
from executor.results.run_table import first_line, shown_seconds
from executor.system.output import moment, shown_digest, shown_duration

STATUS_KINDS = {"done": "good", "failed": "bad", "killed": "bad", "stopped": "warn", "running": "warn"}
STATE_KINDS = {"done": "good", "cached": "info", "failed": "bad", "running": "warn", "interrupted": "warn"}
MOST_GONE = 12
MOST_DRAWN = 150  # nodes of a graph
GPU = "GPU memory"
NAMES = ("node", "op", "state", "time", "memory", GPU, "disk", "artifact", "why")


def overview(runs: Sequence[RunFacts]) -> Markup:
    """A column for each run, then one line for each problem."""
    facts = [_facts(run) for run in runs]
    rows = [[name, *(of_run[name] for of_run in facts)] for name in facts[0]]
    notices = [notice for run in runs for notice in _notices(run, len(runs) > 1)]
    return render("overview", table(run_columns("run", runs), rows), notices)


def _facts(run: RunFacts) -> dict[str, object]:
    nodes = list(run.nodes.values())
    states = [node.shown_state for node in nodes]
    state = run.record.state
    sizes = {node.recorded.digest: node.size for node in nodes if node.size is not None}
    return {
        "id": run.run,
        "status": mark(run.status, STATUS_KINDS.get(run.status, "")),
        "pipeline": state.pipeline,
        "started": moment(state.started),
        "took": shown_duration(run.seconds),
        "nodes": f"{states.count('done')} computed, {states.count('cached')} cached, {len(states)} in all",
        "artifacts": shown_bytes(sum(sizes.values())),
        "tags": ", ".join(run.tags) or None,
    }


def _notices(run: RunFacts, is_named: bool) -> Iterable[str]:
    head = f"{run.label}: " if is_named else ""
    remedy = f"resume with: dflow resume {run.run}"
    if run.status == "running":
        yield f"{head}the run is still running; its unfinished nodes are missing here"
    elif run.status == "killed":
        yield f"{head}the run was killed; {remedy}"
    elif run.status == "stopped":
        yield f"{head}the run was stopped; {remedy}"
    for node in run.nodes.values():
        if node.recorded.state == "failed":
            yield head + line(evolve(node.failure, what=first_line(node.failure.what)), run.run)
    gone = [node.id for node in run.nodes.values() if node.is_gone]
    if gone:
        names = ", ".join(gone[:MOST_GONE]) + (" ..." if len(gone) > MOST_GONE else "")
        yield (
            f"{head}the store no longer holds {len(gone)} of the artifacts ({names}): they were collected or damaged; "
            "their metrics are from the record, their own sections are missing"
        )
    for damage in run.damage:
        yield f"{head}{damage}"


def pipelines(runs: Sequence[RunFacts]) -> Markup:
    """The graph with a table of the nodes beside or below it; of several runs the graphs, with folded tables."""
    if len(runs) == 1:
        return render("beside", _graph(runs[0]), _table(runs[0]))
    graphs = render("side_by_side", [(run.label, _graph(run)) for run in runs])
    return joined([graphs, *(render("folded", f"{run.label}: all nodes", _table(run)) for run in runs)])


def _graph(run: RunFacts) -> Markup:
    nodes = run.nodes
    if not nodes:
        return faint("the run has no nodes")
    if len(nodes) > MOST_DRAWN:
        return faint(f"{len(nodes)} nodes are too many for a picture; see the table")
    copies = {node.id: node.copy for row in run.combinations for node in row.combination.nodes}
    figure = graph_figure(
        {node_id: node.parents for node_id, node in nodes.items()},
        {node_id: shown_name(node_id, copies.get(node_id)) for node_id in nodes},
        {node_id: node.shown_state for node_id, node in nodes.items()},
        {node_id: _state_text(node) for node_id, node in nodes.items()},
    )
    return embedded(figure, "the nodes and what reads from what")


def _state_text(node: NodeFacts) -> str:
    seconds = shown_duration(node.seconds) if node.seconds is not None else shown_seconds(node.recorded)
    return f"{node.shown_state}, {seconds}" if seconds and node.shown_state != "pending" else node.shown_state


def _table(run: RunFacts) -> Markup:
    """Without the GPUs where no node used one."""
    rows = [_row(node) for node in run.nodes.values()]
    names = [name for name in NAMES if name != GPU or any(row[name] is not None for row in rows)]
    return table(names, [[row[name] for name in names] for row in rows], class_="nodes")


def _row(node: NodeFacts) -> dict[str, object]:
    recorded, state = node.recorded, node.shown_state
    why = first_line(recorded.error) if recorded.error else recorded.reason
    if state == "cached":
        why = f"from run {recorded.source_run}" if recorded.source_run else "it was in the store"
    size = "gone" if node.is_gone else None
    cells: list[object] = [
        node.id,
        node.op,
        mark(state, STATE_KINDS.get(state, "")),
        None if node.seconds is None else shown_duration(node.seconds),
        None if node.memory is None else shown_bytes(node.memory),
        None if node.gpu_memory is None else shown_bytes(node.gpu_memory),
        size if node.size is None else shown_bytes(node.size),
        shown_digest(recorded.digest) or None,
        why or None,
    ]
    return dict(zip(NAMES, cells, strict=True))


def troubles(runs: Sequence[RunFacts]) -> Markup:
    """Errors first, as recorded; then each warning once, with its nodes and runs."""
    failed = [
        render("folded", f"{run.label}: {node.id}", render("text", block(node.failure, run.run)), True)
        for run in runs
        for node in run.nodes.values()
        if node.recorded.failure
    ]
    given: dict[str, list[tuple[RunFacts, str]]] = {}
    for run in runs:
        for node in run.nodes.values():
            for warning in node.recorded.warnings:
                given.setdefault(warning, []).append((run, node.id))
    warned = []
    for warning, givers in given.items():
        labels = {run.run: run.label for run, _ in givers}
        text = for_run(warning, givers[0][0].run) if len(labels) == 1 else warning
        nodes = list(dict.fromkeys(node_id for _, node_id in givers))
        warned.append((text, nodes, list(labels.values()) if len(runs) > 1 else ()))
    return joined([*failed, *([render("warnings", warned)] if warned else [])])
