"""What stands beside each other in charts and tables: runs, and in place of a run with a sweep its combinations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from executor.report.run_data import NodeFacts, RunFacts
from executor.results.sweep_table import Row

MOST_COLUMNS = 16  # of all combinations: more nobody tells apart
MOST_NAMED = 3


def columns_of(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """Each run; each of the first combinations as if it were a run, its copies under the names of what was copied."""
    found: list[RunFacts] = []
    for run in runs:
        rows = run.combinations[: max(1, MOST_COLUMNS // len(runs))]
        found += [_column(run, row, is_alone=len(runs) == 1) for row in rows] if rows else [run]
    return [attrs.evolve(column, place=place) for place, column in enumerate(found)]


def shared(columns: Sequence[RunFacts], node_id: str) -> list[tuple[RunFacts, NodeFacts]]:
    """The node of each column that has one; the same artifact with the same figures once, under the names of all."""
    owners: dict[object, list[RunFacts]] = {}
    for column in columns:
        if node_id in column.nodes:
            owners.setdefault(_identity(column, column.nodes[node_id]), []).append(column)
    return [(named(own), own[0].nodes[node_id]) for own in owners.values()]


def _identity(column: RunFacts, node: NodeFacts) -> object:
    """Runs that made the same content may have measured other figures; nan is nan."""
    figures = {name: repr(float(value)) for name, value in node.recorded.metrics.items()}
    return node.recorded.digest or (column.run, node.id), frozenset(figures.items())


def node_ids(columns: Sequence[RunFacts]) -> list[str]:
    """Those of all columns, each once, in the order of the data."""
    return list(dict.fromkeys(node_id for column in columns for node_id in column.nodes))


def _column(run: RunFacts, row: Row, *, is_alone: bool) -> RunFacts:
    own = {node.id for node in row.combination.nodes}
    names = {node_id: _name(node) for node_id, node in run.nodes.items() if not node.template or node_id in own}
    nodes: Mapping[str, NodeFacts] = {name: run.nodes[node_id] for node_id, name in names.items()}
    name = row.combination.name
    results = [names[node_id] for node_id in run.results if node_id in names]
    return attrs.evolve(run, label=name if is_alone else f"{run.label}: {name}", nodes=nodes, results=results)


def _name(node: NodeFacts) -> str:
    return node.template or node.id


def named(columns: Sequence[RunFacts]) -> RunFacts:
    """The first of them under the names of all."""
    labels = list(dict.fromkeys(column.label for column in columns))
    more = f" and {len(labels) - MOST_NAMED} more" if len(labels) > MOST_NAMED else ""
    return attrs.evolve(columns[0], label="; ".join(labels[:MOST_NAMED]) + more)
