"""The report of one run or of several as one HTML file: without scripts, fonts or anything else from the network.

Of several runs it is a comparison: the answers, the text of `dflow diff`, and one table of figures. All of a run is in
its own report; metrics over steps, of several runs in one chart, are in MLflow.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen
from markupsafe import Markup

from dsl.errors import StoreError
from dsl.files import output_errors, write_whole
from dsl.finding import block, for_run, line
from dsl.shown import shown_bytes
from executor.model_tools.measure import kept
from executor.planning.run_diff import MetricPair, compare_runs, runs_text
from executor.records.events import SYSTEM
from executor.records.graph_file import recorded_nodes
from executor.records.run_record import Record
from executor.report.artifacts import Embedded, accounts_of, compared_sections, node_sections, samples, sections_of
from executor.report.first_screen import answers
from executor.report.pictures import Curve, curves_figure, embedded, graph_figure, parts_figure, shown_name
from executor.report.run_data import NodeFacts, RunFacts, columns_of, find_records, read_runs
from executor.report.templates import (
    breakable,
    faint,
    joined,
    left_out,
    limited,
    mark,
    page,
    render,
    table,
)
from executor.results.run_table import JUDGED, first_line, result_rows, shown_seconds
from executor.store.artifact_store import Store
from executor.system.output import moment, shown_digest, shown_duration
from ops.lib.report_sections import NOT_KNOWN

STATUS_KINDS = {"done": "good", "failed": "bad", "killed": "bad", "stopped": "warn", "running": "warn"}
STATE_KINDS = {"done": "good", "cached": "info", "failed": "bad", "running": "warn", "interrupted": "warn"}
MOST_GONE = 12
MOST_NAMED = 3  # runs or combinations over a column
MOST_ROWS = 200
MOST_IN_GRAPH = 150  # nodes
GPU = "GPU memory"
NAMES = ("node", "op", "state", "time", "memory", GPU, "disk", "artifact", "why")
# The last parts of the names of the metrics that are drawn, in this order; without any the first ones.
FIRST = ("tau", "loss", "accuracy", "expected_tau", "lr", "grad_norm")
MOST_PANELS = 3
LEAST_POINTS = 2
MOST_DRAWN = 24  # nodes with curves
PART = re.compile(r".+_(low|high|\d{2,})")  # the end of an interval, a value by slot
IN_MLFLOW = "All metrics over their steps, of several runs in one chart, and the machine's: dflow ui"
ONE_BY_ONE = "Samples, artifacts, curves and configs of each run are in its own report: dflow report RUN"
LONG = 10  # characters of a number before it is rounded

Final = Mapping[str, float]


@frozen
class Block:
    """A part of the report page, with a link in the page's head; left out where it is empty."""

    id: str
    title: str
    content: Markup


def write_report(store: Path, run_ids: Sequence[str], path: Path) -> None:
    """Write the report of runs, given by id, part of an id, or tag; of the newest run if none is given.

    The others are compared with the first. A run that is running, failed or was killed, or whose artifacts were
    collected, is shown as far as it is known. Raises StoreError that names every missing run, and DflowError where the
    file cannot be written.
    """
    opened = Store.open(store, write=False)
    text = report_text(opened, find_records(opened.records, run_ids))
    with output_errors(path):
        write_whole(path, text.encode(errors="backslashreplace"))


def report_text(store: Store, records: Sequence[Record]) -> str:
    """The HTML report of these runs."""
    runs = read_runs(store, records)
    blocks = [block for block in _blocks(store, runs) if block.content]
    pipeline = runs[-1].record.state.pipeline
    return page(pipeline=pipeline, runs=runs, blocks=blocks, written=moment(time.time()), store=store.path)


def _blocks(store: Store, runs: Sequence[RunFacts]) -> list[Block]:
    """The blocks of the report, beginning with what a reader wants to know of a draft."""
    (shown, together), columns, embedded = sections_of(runs, compared=True), columns_of(runs), Embedded()
    first = [
        Block("answers", "In short", answers(columns, shown)),
        Block("runs", "Runs" if len(runs) > 1 else "Run", overview(runs)),
        Block("combinations", "Combinations", combinations(runs, columns)),
        Block("compared", "Compared", compared_sections(together, embedded)),
    ]
    if len(runs) > 1:
        differing = Block("differences", "Differences", differences(store, runs))
        return [*first, differing, Block("results", "Results", joined([results(columns), faint(ONE_BY_ONE)]))]
    (run,) = runs
    return [
        *first,
        Block("results", "Results", results(columns)),
        Block("parts", "Where tau is lost", lost_parts(run)),
        Block("pipeline", "Pipeline", pipeline(run)),
        Block("curves", "Curves", curves(run)),
        Block("samples", "Samples", samples(run, accounts_of(run, shown))),
        Block("artifacts", "Artifacts", node_sections(run, shown, embedded)),
        Block("troubles", "Warnings and errors", troubles(run)),
        Block("configs", "Configs", configs(run)),
        Block("environment", "Environment", environment(run)),
    ]


# The runs, and the combinations of a sweep.


def overview(runs: Sequence[RunFacts]) -> Markup:
    """A table with a column for each run, followed by a line for each problem."""
    facts = [_facts(run) for run in runs]
    rows = [[name, *(of_run[name] for of_run in facts)] for name in facts[0]]
    notices = [notice for run in runs for notice in _notices(run, len(runs) > 1)]
    columns = ["run", *(run.label for run in runs)] if len(runs) > 1 else ("", "")
    return render("overview", table(columns, rows), notices)


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
    elif run.status in ("killed", "stopped"):
        yield f"{head}the run was {run.status}; {remedy}"
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


def combinations(runs: Sequence[RunFacts], columns: Sequence[RunFacts]) -> Markup:
    """A table of combinations for each run that is a sweep, as in the terminal."""
    parts = []
    for run in [run for run in runs if run.combinations]:
        header, rows, more = run.combinations_table
        shown = sum(column.run == run.run for column in columns)
        content = [table(header, rows[:MOST_ROWS], "figures"), faint(*_notes(run, more, shown))]
        parts.append(joined(content) if len(runs) == 1 else render("headed", run.label, joined(content)))
    return joined(parts)


def _notes(run: RunFacts, more: int, shown: int) -> list[str]:
    count = len(run.combinations)
    is_sorted = any(run.sorted_by in row.metrics for row in run.combinations)
    notes = [f"{count} combinations, by {run.sorted_by}."] if is_sorted else []
    if more or count > MOST_ROWS:
        notes.append(f"{more} more metrics, {max(0, count - MOST_ROWS)} more rows: dflow status {run.run} --json")
    if count > shown:
        notes.append(f"Below, the first {shown} are compared.")
    return notes


# What differs between runs, and their figures.


def differences(store: Store, runs: Sequence[RunFacts]) -> Markup:
    """The differences of each run from the first, as in `dflow diff`; runs with damaged records are only named."""
    damages = [(run, _damage(run)) for run in runs]
    parts = [
        render("sentence", f"{run.label} cannot be compared with others: {damage}") for run, damage in damages if damage
    ]
    whole = [run for run, damage in damages if not damage]
    for run in whole[1:]:
        text = runs_text(whole[0].record, run.record, compare_runs(store, whole[0].record, run.record))
        parts.append(render("headed", f"{run.label} against {whole[0].label}", render("text", text)))
    return joined(parts)


def _damage(run: RunFacts) -> str:
    try:
        run.record.plan()
        recorded_nodes(run.record.folder)
    except StoreError as error:
        return str(error)
    return ""


def results(columns: Sequence[RunFacts]) -> Markup:
    """The metrics of the pipeline's result nodes; those that judge the result come first."""
    names = list(dict.fromkeys(node_id for column in columns for node_id in column.results))
    shown = limited(names, lambda node_id: _results_of_node(columns, node_id))
    return shown or faint("No node with results has finished.")


def _results_of_node(columns: Sequence[RunFacts], node_id: str) -> Markup:
    """A table of a node's metrics with a column for each artifact, or for each run that measured other
    values for it.
    """
    owners: dict[object, list[RunFacts]] = {}
    for column in columns:
        if node_id in column.nodes:
            recorded = column.nodes[node_id].recorded
            measured = frozenset((name, repr(float(value))) for name, value in recorded.metrics.items())  # nan is nan
            owners.setdefault((recorded.digest or column.label, measured), []).append(column)
    finals = [(_joint_label(own), own[0].nodes[node_id].recorded.metrics) for own in owners.values()]
    if not any(final for _, final in finals):
        return Markup("")
    judged = frozenset(name for column in columns for name in column.record.state.judged_by) or JUDGED
    return figures_table(finals, is_one=len(columns) == 1, judged=judged)


def _joint_label(columns: Sequence[RunFacts]) -> str:
    labels = list(dict.fromkeys(column.label for column in columns))
    more = f" and {len(labels) - MOST_NAMED} more" if len(labels) > MOST_NAMED else ""
    return "; ".join(labels[:MOST_NAMED]) + more


def figures_table(finals: Sequence[tuple[str, Final]], *, is_one: bool, judged: Collection[str] = JUDGED) -> Markup:
    """A table with a row for each metric, as in the terminal, and a column for each label."""
    shown = [{name: cells for name, *cells in result_rows(final, judged)} for _, final in finals]
    every = result_rows({name: 0.0 for _, final in finals for name in final}, judged)
    names = dict.fromkeys([*(name for name, *_ in every), *(name for cells in shown for name in cells)])
    first = finals[0][1]
    rows = [
        [
            breakable(name),
            *(
                _cell(cells.get(name), MetricPair(name, first.get(name), final.get(name)))
                for cells, (_, final) in zip(shown, finals, strict=True)
            ),
        ]
        for name in names
        if any(name in cells for cells in shown)
    ]
    columns = ["figure", "value"] if is_one else ["figure", *(label for label, _ in finals)]
    return table(columns, rows, "figures")


def _cell(shown: Sequence[str] | None, pair: MetricPair) -> Markup | None:
    """A table cell with a value, its interval, and its difference from the first run's value."""
    if shown is None:
        return None
    value, interval = shown
    is_unknown = pair.difference is None or pair.is_same or value == NOT_KNOWN
    return render("figure", value, interval, "" if is_unknown else f"{pair.difference:+.3g}")


# The nodes of one run.


def pipeline(run: RunFacts) -> Markup:
    """The graph of a run, beside or above a table of its nodes with the time, memory and disk of each."""
    return render("beside", _graph(run), _table(run))


def _graph(run: RunFacts) -> Markup:
    nodes = run.nodes
    if not nodes:
        return faint("the run has no nodes")
    if len(nodes) > MOST_IN_GRAPH:
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
    """The table of a run's nodes; GPU columns are left out if no node used one."""
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


def curves(run: RunFacts) -> Markup:
    """A small picture for each node that logged a metric twice."""
    panels = {node_id: found for node_id, node in run.nodes.items() if (found := panels_of(_logged(node)))}
    drawn, omitted = list(panels)[:MOST_DRAWN], list(panels)[MOST_DRAWN:]
    if not panels:
        return Markup("")
    pictures = limited(
        drawn, lambda node_id: embedded(curves_figure(panels[node_id]), f"{', '.join(panels[node_id])} over steps")
    )
    return joined([pictures, faint(*([left_out(omitted)] if omitted else []), IN_MLFLOW)])


def lost_parts(run: RunFacts) -> Markup:
    """A picture for each draft that `dflow diagnose` measured: tau by part, and what the training has there."""
    found = {name: result.parts for name, result in kept(run.record).items()}
    tables = {name: {table: parts for table, parts in of.items() if len(parts) > 1} for name, of in found.items()}
    drawn = [name for name, of in tables.items() if of]
    if not drawn:
        return Markup("")
    pictures = limited(
        drawn, lambda name: embedded(parts_figure(tables[name]), f"tau of {name} by part of its prompts")
    )
    return joined([pictures, faint("As dflow diagnose measured it; the bars show how much of the tokens is there.")])


def _logged(node: NodeFacts) -> dict[str, list[tuple[float, float]]]:
    """The valid points of each logged metric as (step, value), in order; machine usage is left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for point in node.events.points:
        for name, value in point.metrics.items():
            if not name.startswith(SYSTEM):
                found.setdefault(name, []).append((point.step, value))
    return found


def panels_of(points: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, list[Curve]]:
    """The main metrics in panels by the last part of their names: `train/loss` and `val/loss` share one.

    A panel with a single metric has its whole name.
    """
    kinds: dict[str, list[Curve]] = {}
    for name, of_name in points.items():
        if not PART.fullmatch(name):
            low, high = dict(points.get(f"{name}_low", ())), dict(points.get(f"{name}_high", ()))
            bounds = [(low[step], high[step]) if step in low and step in high else None for step, _ in of_name]
            kinds.setdefault(name.rpartition("/")[2], []).append(Curve(name, of_name, bounds))
    long = [kind for kind, of in kinds.items() if any(len(curve.points) >= LEAST_POINTS for curve in of)]
    chosen = [kind for kind in FIRST if kind in long] or long
    return {of[0].name if len(of := kinds[kind]) == 1 else kind: of for kind in chosen[:MOST_PANELS]}


def troubles(run: RunFacts) -> Markup:
    """The errors of a run as recorded, then each warning once, with its nodes."""
    failed = [
        render("folded", node.id, render("text", block(node.failure, run.run)), True)
        for node in run.nodes.values()
        if node.recorded.failure
    ]
    warned: dict[str, list[str]] = {}
    for node in run.nodes.values():
        for warning in node.recorded.warnings:
            warned.setdefault(for_run(warning, run.run), []).append(node.id)
    return joined([*failed, *([render("warnings", warned)] if warned else [])])


def configs(run: RunFacts) -> Markup:
    """The config values of each node, in sections that are folded."""

    def of_node(node_id: str) -> Markup:
        node = run.nodes[node_id]
        copy = f", a copy of {node.template}" if node.template else ""
        values = {**node.config, **{f"launch.{name}": value for name, value in node.launch.items()}}
        return render("folded", f"{node.id} {node.op}{copy}", _facts_table(values))

    return limited(list(run.nodes), of_node, has_heads=False)


def environment(run: RunFacts) -> Markup:
    """Versions of libraries and how the nodes were launched, as the manifests of the artifacts record them."""
    versions: dict[str, dict[str, None]] = {}
    launched = {}
    for node in run.nodes.values():
        if node.manifest is not None:
            launched[node.id] = ", ".join(
                f"{name} {_value_text(value)}" for name, value in node.manifest.launch.items()
            )
            for name, version in node.manifest.key_parts.libraries.items():
                versions.setdefault(name, {})[str(version)] = None
    if not launched:
        return faint("No artifact of this run is present, so versions and devices are not known.")
    libraries = _facts_table({name: ", ".join(found) for name, found in sorted(versions.items())})
    return joined([libraries, render("folded", "devices and processes", _facts_table(launched))])


def _facts_table(values: Mapping[str, Any]) -> Markup:
    return table(("", ""), [(name, _value_text(value)) for name, value in values.items()]) if values else Markup("")


def _value_text(value: Any) -> str | None:
    """A value of a config or a file as a text, lists and tables as JSON."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and len(repr(value)) > LONG:
        return f"{value:.6g}"
    return json.dumps(value, ensure_ascii=False)
