"""The final figures of the runs: a table with their intervals, bars of those that have some, and numbered series.

By the names alone: `x_low` and `x_high` are the interval of `x`, and `x_01`, `x_02`, ... are values by slot.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from executor.explain.run_diff import MetricPair
from executor.report.chart import drawn, together
from executor.report.columns import shared
from executor.report.markup import Markup, breakable, element, joined, limited, paragraph, shown_figure, table
from executor.report.overview import run_name
from executor.report.run_data import NodeFacts, RunFacts
from executor.results.metric_order import JUDGED, figures_in_order
from ops.lib.report_sections import Chart, Series

NUMBERED = re.compile(r"(.+)_(\d{2,})")
LEAST_NUMBERED = 2

Final = Mapping[str, float]


def results(columns: Sequence[RunFacts]) -> Markup:
    """The figures of the nodes that hold the pipeline's results: those that differ between runs come first."""
    names = list(dict.fromkeys(node_id for column in columns for node_id in column.results))
    shown = limited(names, lambda node_id: _of_node(shared(columns, node_id), is_one=len(columns) == 1))
    return shown or paragraph("No node with results has finished.", class_="faint")


def _of_node(there: Sequence[tuple[RunFacts, NodeFacts]], *, is_one: bool) -> Markup:
    finals = [(run, node.recorded.metrics) for run, node in there]
    if not any(final for _, final in finals):
        return Markup("")
    judged = frozenset(name for run, _ in finals for name in run.record.state.judged_by) or JUDGED
    return element(
        "div", figures_table(finals, is_one=is_one, judged=judged), *numbered_charts(finals), class_="beside"
    )


def figures_table(
    finals: Sequence[tuple[RunFacts, Final]], *, is_one: bool, judged: Collection[str] = JUDGED
) -> Markup:
    """A row for each figure, in the order of `figures_in_order`, a column for each run."""
    values = [final for _, final in finals]
    known = {name for final in values for name in final}
    differing = {name for name in known if _differs(name, values)}
    names = [name for name in figures_in_order(known, judged, differing) if not _is_part(name, values)]
    rows = [[breakable(name), *(_cell(name, values[0], final) for final in values)] for name in names]
    columns = ["figure", "value"] if is_one else ["figure", *(run_name(run) for run, _ in finals)]
    return table(columns, rows, class_="figures")


def numbered_charts(finals: Sequence[tuple[RunFacts, Final]]) -> list[Markup]:
    """Bars over the number for each series such as `eval/acceptance_slot_01`, the runs side by side."""
    stems = dict.fromkeys(
        found[1] for _, final in finals for name in final if (found := NUMBERED.fullmatch(name)) is not None
    )
    charts = []
    for stem in stems:
        measured = [(run, values) for run, final in finals if (values := _numbered(stem, final))]
        if max(len(values) for _, values in measured) >= LEAST_NUMBERED:
            label = re.split("[_/]", stem)[-1]
            drawings = [
                (run.label, run.place, Chart([Series(stem, list(values), list(values.values()))], label, "", "bars"))
                for run, values in measured
            ]
            chart, looks = together(drawings)
            charts.append(element("div", element("h4", stem), drawn(chart, looks)))
    return [element("div", *charts, class_="grid")] if charts else []


def _is_part(name: str, finals: Sequence[Final]) -> bool:
    """Whether a row or a chart of something else tells it."""
    names = {name for final in finals for name in final}
    whole, _, end = name.rpartition("_")
    if end in ("low", "high"):
        return {whole, f"{whole}_low", f"{whole}_high"} <= names
    found = NUMBERED.fullmatch(name)
    return found is not None and max(len(_numbered(found[1], final)) for final in finals) >= LEAST_NUMBERED


def _numbered(stem: str, final: Final) -> dict[int, float]:
    found = [(name, NUMBERED.fullmatch(name)) for name in sorted(final)]
    return {int(match[2]): final[name] for name, match in found if match is not None and match[1] == stem}


def _cell(name: str, first: Final, final: Final) -> object:
    if name not in final:
        return None
    bounds = [final[bound] for bound in (f"{name}_low", f"{name}_high") if bound in final]
    parts: list[object] = [element("b", shown_figure(final[name]))]
    if len(bounds) == 2:
        parts.append(element("span", f" [{shown_figure(bounds[0])}, {shown_figure(bounds[1])}]", class_="faint"))
    pair = MetricPair(name, first.get(name), final[name])
    if pair.difference is not None and not pair.is_same:
        parts.append(element("span", f" {pair.difference:+.3g}", class_="change"))
    return joined(parts)


def _differs(name: str, finals: Sequence[Final]) -> bool:
    return any(not MetricPair(name, finals[0].get(name), final.get(name)).is_same for final in finals)
