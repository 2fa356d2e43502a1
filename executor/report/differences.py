"""What differs between the runs of a report, each compared with the first, node by node."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dsl.errors import StoreError
from executor.code_changes import told
from executor.explain import ABSENT, ValueChange
from executor.report.facts import RunFacts
from executor.report.markup import Markup, details, element, joined, paragraph, table
from executor.report.overview import run_name
from executor.run_diff import NodeDiff, compare_runs
from executor.store import Store

WHERE = {"first": "the node is not in this run", "second": "the node is in this run alone"}
SHORT = 12


def differences(store: Store, runs: Sequence[RunFacts]) -> Markup:
    """A table of values, a column for each run; then code, and what is not finished or only in some.

    A run whose record is damaged is named, and compared with none.
    """
    first, *others = runs
    compared: list[tuple[RunFacts, Sequence[NodeDiff]]] = []
    untold: list[Markup] = []
    for run in others:
        try:
            compared.append((run, compare_runs(store, first.record, run.record)))
        except StoreError as error:
            untold.append(paragraph(run_name(run), " cannot be compared with ", run_name(first), f": {error}"))
    values = [_values([first, *(run for run, _ in compared)], compared)] if compared else []
    return joined([*untold, *values, *(_rest(first, run, diffs) for run, diffs in compared)])


def _values(runs: Sequence[RunFacts], compared: Sequence[tuple[RunFacts, Sequence[NodeDiff]]]) -> Markup:
    """Each value that is another one in some run. Where a run was not found to differ, it has the first one's."""
    changed: dict[tuple[str, str, str], dict[int, ValueChange]] = {}
    for run, diffs in compared:
        for diff in diffs:
            for change in diff.values:
                changed.setdefault((diff.node, change.kind, change.name), {})[run.place] = change
    if not changed:
        return paragraph("Every value of every config is the same in all runs.")
    rows = []
    for (node, kind, name), changes in changed.items():
        old = next(iter(changes.values())).old
        cells = [_cell(kind, changes[run.place].new if run.place in changes else old) for run in runs]
        shown = [element("b", cell) if cell != cells[0] else cell for cell in cells]
        rows.append([node, name if kind == "config" else f"{name} ({kind})", *shown])
    return table(["node", "value", *map(run_name, runs)], rows)


def _rest(first: RunFacts, run: RunFacts, diffs: Sequence[NodeDiff]) -> Markup:
    lines = [line for diff in diffs for line in told_of(diff)]
    same = [diff.node for diff in diffs if diff.is_same]
    head = joined([run_name(run), " against ", run_name(first)])
    told_same = f"The same artifact, for the same reasons: {', '.join(same)}." if same else ""
    parts = [element("ul", *(element("li", line) for line in lines)) if lines else "", paragraph(told_same)]
    return joined([element("h3", head), *parts, *_code(diffs)])


def told_of(diff: NodeDiff) -> Iterable[str]:
    """One line where something differs."""
    if diff.where != "both":
        yield f"{diff.node}: {WHERE[diff.where]}"
    elif None in diff.digests:
        yield f"{diff.node}: finished in {'one of them only' if any(diff.digests) else 'neither of them'}"
    elif diff.digests[0] != diff.digests[1]:
        yield f"{diff.node}: another artifact ({_short(diff.digests[0])}, {_short(diff.digests[1])}){_because(diff)}"
    elif not diff.is_same:
        yield f"{diff.node}: the same artifact all the same{_because(diff)}"


def _because(diff: NodeDiff) -> str:
    """Settings outside the key are no cause: they change results by rounding only."""
    settings = [change.name for change in diff.values if change.kind == "setting" and not _is_edge(change)]
    causes = [change.name for change in diff.values if change.name not in settings]
    causes += [f"the code of {change.name}" for change in diff.code]
    causes += [f"what it reads from {parent}" for parent in diff.inputs]
    told = f"; what differs: {', '.join(causes)}" if causes else "; nothing that the key sees differs"
    return f"{told}; also set otherwise, outside the key: {', '.join(settings)}" if settings else told


def _is_edge(change: ValueChange) -> bool:
    """Whether it names the nodes that are read."""
    values = [*_listed(change.old), *_listed(change.new)]
    return any(isinstance(value, str) and value.startswith("@") for value in values)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _code(diffs: Sequence[NodeDiff]) -> Iterable[Markup]:
    for diff in diffs:
        lines = list(told(diff.code, lambda module: module))
        if lines:
            yield details(f"{diff.node}: code", element("pre", "\n".join(lines)))


def _cell(kind: str, value: Any) -> str | None:
    if value is ABSENT:
        return None
    return str(value)[:SHORT] if kind == "content" else json.dumps(value, ensure_ascii=False)


def _short(digest: str | None) -> str:
    return (digest or "")[:SHORT]
