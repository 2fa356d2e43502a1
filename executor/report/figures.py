"""The metrics of the runs: the final ones with their intervals, those of a sweep's combinations, and small curves."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from markupsafe import Markup

from executor.explain.run_diff import MetricPair
from executor.records.metric_points import SYSTEM
from executor.report.pictures import Curve, curves_figure, embedded
from executor.report.run_data import NodeFacts, RunFacts, node_ids, shared
from executor.report.templates import breakable, faint, joined, left_out, limited, render, table
from executor.results.metric_order import JUDGED
from executor.results.run_table import result_rows
from ops.lib.report_sections import NOT_KNOWN

MOST_ROWS = 200
# The last parts of the names of the metrics that are drawn, in this order; without any the first ones.
FIRST = ("tau", "loss", "accuracy", "expected_tau", "lr", "grad_norm")
MOST_PANELS = 3
LEAST_POINTS = 2
MOST_DRAWN = 24  # nodes of all runs
PART = re.compile(r".+_(low|high|\d{2,})")  # the end of an interval, a value by slot
IN_MLFLOW = "All metrics over their steps, of several runs in one chart, and the machine's: dflow ui"

Final = Mapping[str, float]


def results(columns: Sequence[RunFacts]) -> Markup:
    """The metrics of the pipeline's result nodes, those by which the result is judged first."""
    names = list(dict.fromkeys(node_id for column in columns for node_id in column.results))
    shown = limited(names, lambda node_id: _results_of_node(shared(columns, node_id), is_one=len(columns) == 1))
    return shown or faint("No node with results has finished.")


def _results_of_node(there: Sequence[tuple[RunFacts, NodeFacts]], *, is_one: bool) -> Markup:
    finals = [(run, node.recorded.metrics) for run, node in there]
    if not any(final for _, final in finals):
        return Markup("")
    judged = frozenset(name for run, _ in finals for name in run.record.state.judged_by) or JUDGED
    return figures_table(finals, is_one=is_one, judged=judged)


def figures_table(
    finals: Sequence[tuple[RunFacts, Final]], *, is_one: bool, judged: Collection[str] = JUDGED
) -> Markup:
    """A row for each figure, as in the terminal, and a column for each run."""
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
    columns = ["figure", "value"] if is_one else ["figure", *(run.label for run, _ in finals)]
    return table(columns, rows, "figures")


def _cell(shown: Sequence[str] | None, pair: MetricPair) -> Markup | None:
    """The value, its interval, and how far it is from that of the first run."""
    if shown is None:
        return None
    value, interval = shown
    is_unknown = pair.difference is None or pair.is_same or value == NOT_KNOWN
    return render("figure", value, interval, "" if is_unknown else f"{pair.difference:+.3g}")


def combinations(runs: Sequence[RunFacts], columns: Sequence[RunFacts]) -> Markup:
    """A table for each run that has a sweep, as in the terminal."""
    parts = []
    for run in [run for run in runs if run.combinations]:
        header, rows, more = run.combinations_table
        drawn = sum(column.run == run.run for column in columns)
        content = [table(header, rows[:MOST_ROWS], "figures"), faint(*_notes(run, more, drawn))]
        parts.append(joined(content) if len(runs) == 1 else render("headed", run.label, joined(content)))
    return joined(parts)


def _notes(run: RunFacts, more: int, drawn: int) -> list[str]:
    count = len(run.combinations)
    is_sorted = any(run.sorted_by in row.metrics for row in run.combinations)
    notes = [f"{count} combinations, by {run.sorted_by}."] if is_sorted else []
    if more or count > MOST_ROWS:
        notes.append(f"{more} more metrics, {max(0, count - MOST_ROWS)} more rows: dflow status {run.run} --json")
    if count > drawn:
        notes.append(f"Below, the first {drawn} are compared; the others appear only in Pipeline and Configs.")
    return notes


def curves(columns: Sequence[RunFacts]) -> Markup:
    """A small picture for each node that logged a metric twice, in the order of the data."""
    names = node_ids(columns)
    left = MOST_DRAWN
    omitted: list[str] = []

    def of_node(node_id: str) -> Markup:
        nonlocal left
        parts = []
        for run, node in shared(columns, node_id):
            panels = panels_of(logged(node))
            if panels and left:
                left -= 1
                picture = embedded(curves_figure(panels), f"{', '.join(panels)} over steps")
                parts += [faint(run.label), picture] if len(columns) > 1 else [picture]
            elif panels:
                omitted.append(node.id)
        return joined(parts)

    shown = limited(names, of_node)
    notes = [*([left_out(omitted)] if omitted else []), IN_MLFLOW]
    return joined([shown, faint(*notes)]) if shown else shown


def logged(node: NodeFacts) -> dict[str, list[tuple[float, float]]]:
    """By metric, step and value of each point that counts, in order; without what the machine was used for."""
    found: dict[str, list[tuple[float, float]]] = {}
    for point in node.events.points:
        for name, value in point.metrics.items():
            if not name.startswith(SYSTEM):
                found.setdefault(name, []).append((point.step, value))
    return found


def panels_of(points: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, list[Curve]]:
    """The main metrics by the last part of their names: `train/loss` and `val/loss` share a panel. A panel with one has
    its whole name.
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
