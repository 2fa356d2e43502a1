"""Named values of several runs in one table, what differs first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from executor.report.facts import RunFacts
from executor.report.markup import Markup, element, table
from executor.report.overview import run_name

ABSENT = object()


def compared(runs: Sequence[RunFacts], values: Sequence[Mapping[str, Any]], head: str) -> Markup:
    """A row for each name, a column for each run; empty where there is nothing to show."""
    names = dict.fromkeys(name for of_run in values for name in of_run)
    rows = [(name, [shown(of_run.get(name, ABSENT)) for of_run in values]) for name in names]
    rows.sort(key=lambda row: not differ(row[1]))
    cells = [
        [name, *(element("b", cell, class_="change") if differ(row) else cell for cell in row)] for name, row in rows
    ]
    if not cells:
        return Markup("")
    return table([head, *map(run_name, runs)] if len(runs) > 1 else ("", ""), cells)


def differ(values: Sequence[object]) -> bool:
    return len(set(values)) > 1


def shown(value: Any) -> Any:
    """A value of a config or a file as a cell: a reference as it is written, lists and tables as JSON."""
    if value is ABSENT or value is None:
        return None
    if isinstance(value, dict) and value.keys() == {"ref"}:
        return f"@{value['ref']}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
