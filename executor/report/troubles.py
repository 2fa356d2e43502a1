"""What the nodes warned of, and why some of them failed."""

from __future__ import annotations

from collections.abc import Sequence

from executor.report.markup import Markup, details, element, joined
from executor.report.overview import run_name
from executor.report.run_data import RunFacts


def troubles(runs: Sequence[RunFacts]) -> Markup:
    """Errors first, as they were recorded; then each warning once, with the nodes and runs that gave it."""
    failed = [(run, node) for run in runs for node in run.nodes.values() if node.recorded.error]
    errors = [
        details(joined([run_name(run), f": {node.id}"]), element("pre", node.recorded.error), is_open=True)
        for run, node in failed
    ]
    warned: dict[str, list[tuple[RunFacts, str]]] = {}
    for run in runs:
        for node in run.nodes.values():
            for warning in node.recorded.warnings:
                warned.setdefault(warning, []).append((run, node.id))
    items = []
    for warning, givers in warned.items():
        nodes = dict.fromkeys(node_id for _, node_id in givers)
        names = dict.fromkeys(run_name(run) for run, _ in givers) if len(runs) > 1 else ()
        items.append(
            element("li", element("b", ", ".join(nodes)), *(joined([" ", name]) for name in names), ": ", warning)
        )
    return joined([*errors, element("ul", *items) if items else ""])
