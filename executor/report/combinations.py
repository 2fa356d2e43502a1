"""The combinations of a sweep: what was chosen, and the figures that came of it, the best first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from executor.report.markup import Markup, element, html, joined, paragraph, table
from executor.report.overview import run_name
from executor.report.run_data import RunFacts
from executor.results.metric_order import JUDGED
from executor.results.run_table import result_rows
from executor.results.sweep_table import Row, shown_metrics

MOST_METRICS = 8
MOST_ROWS = 200


def combinations_block(runs: Sequence[RunFacts], columns: Sequence[RunFacts]) -> Markup:
    """A table for each run that has a sweep; the colours are those of the columns, where a combination is one."""
    parts = []
    for run in runs:
        if run.combinations:
            head = element("h3", run_name(run)) if len(runs) > 1 else ""
            own = [column for column in columns if column.run == run.run]
            parts.append(joined([head, _table(run, own), *map(paragraph, _told(run, len(own)))]))
    return joined(parts)


def _table(run: RunFacts, columns: Sequence[RunFacts]) -> Markup:
    rows = run.combinations[:MOST_ROWS]
    groups = list(dict.fromkeys(group for row in rows for group in row.combination.values))
    judged = frozenset(run.record.state.judged_by) or JUDGED
    figures = [{name: (value, interval) for name, value, interval in result_rows(row.metrics, judged)} for row in rows]
    names = shown_metrics(rows, (name for cells in figures for name in cells), run.sorted_by)[:MOST_METRICS]
    dots: list[object] = [run_name(column, "") for column in columns]
    shown = [
        [
            dot,
            *(row.combination.values.get(group) for group in groups),
            _state(row),
            *(_figure(*cells[name]) if name in cells else None for name in names),
        ]
        for dot, row, cells in zip([*dots, *[html("")] * (len(rows) - len(dots))], rows, figures, strict=True)
    ]
    return table(["", *groups, "state", *names], shown, class_="figures")


def _figure(value: str, interval: str) -> Markup:
    return joined([element("b", value), element("span", f" {interval}", class_="faint") if interval else ""])


def _state(row: Row) -> Markup:
    if not row.state:
        return element("span", "done", class_="mark good")
    return element("span", row.state, class_=f"mark {'bad' if row.state.startswith('failed') else 'warn'}")


def _told(run: RunFacts, drawn: int) -> Iterable[str]:
    count = len(run.combinations)
    if any(run.sorted_by in row.metrics for row in run.combinations):
        yield f"{count} combinations, by {run.sorted_by}."
    if count > MOST_ROWS:
        yield f"{count - MOST_ROWS} more: dflow status {run.run} --json"
    if count > drawn:
        yield f"Below, the first {drawn} are compared; the others have their own parts in Pipeline and Configs alone."
