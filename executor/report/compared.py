"""Named values of several runs in one table, what differs first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from executor.keys.differences import ABSENT, is_different
from executor.report.markup import Markup, element, table
from executor.report.overview import run_name
from executor.report.run_data import RunFacts

LONG = 10  # characters of a number, more of which nobody reads


def compared(runs: Sequence[RunFacts], values: Sequence[Mapping[str, Any]], head: str) -> Markup:
    """A row for each name, a column for each run; empty where there is nothing to show."""
    names = dict.fromkeys(name for of_run in values for name in of_run)
    rows = [(name, [of_run.get(name, ABSENT) for of_run in values]) for name in names]
    rows.sort(key=lambda row: not differ(row[1]))
    cells = [[name, *_cells(row)] for name, row in rows]
    if not cells:
        return Markup("")
    return table([head, *map(run_name, runs)] if len(runs) > 1 else ("", ""), cells)


def differ(values: Sequence[Any]) -> bool:
    """Whether they are not all the same, see `is_different`."""
    return any(is_different(values[0], other) for other in values[1:])


def shown(value: Any) -> Any:
    """A value of a config or a file as a text, lists and tables as JSON."""
    if value is ABSENT or value is None:
        return None
    if isinstance(value, float) and len(repr(value)) > LONG:
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cells(values: Sequence[Any]) -> list[object]:
    cells = list(map(shown, values))
    return [element("b", cell, class_="change") for cell in cells] if differ(values) else cells
