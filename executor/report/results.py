"""The final figures of the runs: a table with their intervals, bars of those that have some, and numbered series.

By the names alone: `x_low` and `x_high` are the interval of `x`, and `x_01`, `x_02`, ... are values by slot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dsl.sections import Chart, Series
from executor.report.chart import drawn, together
from executor.report.facts import NodeFacts, RunFacts
from executor.report.markup import Markup, element, joined, paragraph, shown_figure, table
from executor.report.overview import run_name

NUMBERED = re.compile(r"(.+)_(\d{2,})")
LEAST_NUMBERED = 2


def results(runs: Sequence[RunFacts]) -> Markup:
    """The figures of the nodes that hold the pipeline's results: those that differ between runs come first."""
    node_ids = dict.fromkeys(node_id for run in runs for node_id in run.record.state.result_nodes)
    blocks = []
    for node_id in node_ids:
        finals = [_final(run.nodes.get(node_id)) for run in runs]
        if any(finals):
            shown = element("div", figures_table(runs, finals), *numbered_charts(runs, finals), class_="beside")
            blocks.append(joined([element("h3", node_id), shown]))
    return joined(blocks) or paragraph("No node with results has finished.", class_="faint")


def figures_table(runs: Sequence[RunFacts], finals: Sequence[Mapping[str, float]]) -> Markup:
    """A row for each figure, a column for each run: those with intervals first, of them those that differ."""
    names = sorted({name for final in finals for name in final if not _is_part(name, finals)})
    names.sort(key=lambda name: (not _has_interval(name, finals), not _differs(name, finals)))
    rows = [
        [name, *(_cell(name, finals[0], final, run.place > 0) for run, final in zip(runs, finals, strict=True))]
        for name in names
    ]
    columns = ["figure", *(run_name(run) for run in runs)] if len(runs) > 1 else ["figure", "value"]
    return table(columns, rows, class_="figures")


def numbered_charts(runs: Sequence[RunFacts], finals: Sequence[Mapping[str, float]]) -> list[Markup]:
    """Bars over the number for each series such as `eval/acceptance_slot_01`, the runs side by side."""
    stems = dict.fromkeys(
        found[1] for final in finals for name in final if (found := NUMBERED.fullmatch(name)) is not None
    )
    charts = []
    for stem in stems:
        measured = [
            (run, values) for run, final in zip(runs, finals, strict=True) if (values := _numbered(stem, final))
        ]
        if max(len(values) for _, values in measured) >= LEAST_NUMBERED:
            label = re.split("[_/]", stem)[-1]
            drawings = [
                (run.label, run.place, Chart([Series(stem, list(values), list(values.values()))], label, "", "bars"))
                for run, values in measured
            ]
            chart, looks = together(drawings)
            charts.append(element("div", element("h4", stem), drawn(chart, looks)))
    return [element("div", *charts, class_="grid")] if charts else []


def _final(node: NodeFacts | None) -> Mapping[str, float]:
    return node.recorded.metrics if node is not None else {}


def _is_part(name: str, finals: Sequence[Mapping[str, float]]) -> bool:
    """Whether a row or a chart of something else tells it."""
    names = {name for final in finals for name in final}
    whole, _, end = name.rpartition("_")
    if end in ("low", "high"):
        return {whole, f"{whole}_low", f"{whole}_high"} <= names
    found = NUMBERED.fullmatch(name)
    return found is not None and max(len(_numbered(found[1], final)) for final in finals) >= LEAST_NUMBERED


def _numbered(stem: str, final: Mapping[str, float]) -> dict[int, float]:
    found = [(name, NUMBERED.fullmatch(name)) for name in sorted(final)]
    return {int(match[2]): final[name] for name, match in found if match is not None and match[1] == stem}


def _cell(name: str, first: Mapping[str, float], final: Mapping[str, float], is_compared: bool) -> object:
    if name not in final:
        return None
    bounds = [final[bound] for bound in (f"{name}_low", f"{name}_high") if bound in final]
    parts: list[object] = [element("b", shown_figure(final[name]))]
    if len(bounds) == 2:
        parts.append(element("span", f" [{shown_figure(bounds[0])}, {shown_figure(bounds[1])}]", class_="faint"))
    if is_compared and name in first and first[name] != final[name]:
        parts.append(element("span", f" {final[name] - first[name]:+.3g}", class_="change"))
    return joined(parts)


def _has_interval(name: str, finals: Sequence[Mapping[str, float]]) -> bool:
    return any({f"{name}_low", f"{name}_high"} <= final.keys() for final in finals)


def _differs(name: str, finals: Sequence[Mapping[str, float]]) -> bool:
    return len({final.get(name) for final in finals}) > 1
