"""The final figures of the runs: a table with their intervals, bars of those that have some, and numbered series.

By the names alone: `x_low` and `x_high` are the interval of `x`, and `x_01`, `x_02`, ... are values by slot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dsl.sections import Chart, Series
from executor.report.chart import drawn, together
from executor.report.columns import shared
from executor.report.facts import NodeFacts, RunFacts
from executor.report.markup import Markup, element, joined, limited, paragraph, shown_figure, table
from executor.report.overview import run_name
from executor.run_diff import MetricPair

NUMBERED = re.compile(r"(.+)_(\d{2,})")
LEAST_NUMBERED = 2

Final = Mapping[str, float]


def results(columns: Sequence[RunFacts]) -> Markup:
    """The figures of the nodes that hold the pipeline's results: those that differ between runs come first."""
    names = list(dict.fromkeys(node_id for column in columns for node_id in column.results))
    shown = limited(names, lambda node_id: _of_node(shared(columns, node_id)))
    return shown or paragraph("No node with results has finished.", class_="faint")


def _of_node(there: Sequence[tuple[RunFacts, NodeFacts]]) -> Markup:
    finals = [(run, node.recorded.metrics) for run, node in there]
    if not any(final for _, final in finals):
        return Markup("")
    return element("div", figures_table(finals), *numbered_charts(finals), class_="beside")


def figures_table(finals: Sequence[tuple[RunFacts, Final]]) -> Markup:
    """A row for each figure, a column for each run: those with intervals first, of them those that differ."""
    values = [final for _, final in finals]
    names = sorted({name for final in values for name in final if not _is_part(name, values)})
    names.sort(key=lambda name: (not _has_interval(name, values), not _differs(name, values)))
    rows = [[name, *(_cell(name, values[0], final) for final in values)] for name in names]
    columns = ["figure", *(run_name(run) for run, _ in finals)] if len(finals) > 1 else ["figure", "value"]
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


def _has_interval(name: str, finals: Sequence[Final]) -> bool:
    return any({f"{name}_low", f"{name}_high"} <= final.keys() for final in finals)


def _differs(name: str, finals: Sequence[Final]) -> bool:
    return any(not MetricPair(name, finals[0].get(name), final.get(name)).is_same for final in finals)
