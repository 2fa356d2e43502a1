"""The metric by which the table of a sweep is sorted: the one asked for, else the one that an op is judged by."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from dsl.errors import did_you_mean, shortened
from dsl.graph import Graph
from executor.results.combinations import shown_id
from executor.results.metric_order import is_judged

MISSPELT = 0.85  # as alike as a name with a letter too much; eval/tau and eval/tau_text are less
MOST_NAMES = 400  # characters


def doubt(graph: Graph) -> str:
    """What should be said before anything runs; empty where nothing speaks against the metric asked for.

    What an op logs is not declared, except for the metric that it is judged by.
    """
    name = graph.sort_by.removeprefix("-")
    judged = [each.removeprefix("-") for each in _judged_by(graph)]
    if not name or is_judged(name, judged):
        return ""
    ends = [each for each in judged if "/" not in name and each.rpartition("/")[2] == name]
    near = ends or get_close_matches(name, judged, n=1, cutoff=MISSPELT)
    if not near and "/" in name:
        return ""
    meant = f'did you mean "{near[0]}"?' if near else 'metrics are named with their group, as in "train/loss"'
    return f"the table of the sweep is to be sorted by {name}: {meant}"


def sorting(graph: Graph, names: Iterable[str]) -> tuple[str, bool]:
    """(metric, whether the least comes first). names: of the metrics that the combinations have.

    Where none of them has the one asked for, it is the one that an op is judged by; empty for none.
    """
    found = set(names)
    wanted = [*filter(None, [graph.sort_by]), *_judged_by(graph)]
    for metric in wanted:
        name = _found(graph, metric.removeprefix("-"), found)
        if name:
            return name, metric.startswith("-")
    chosen = next(iter(_judged_by(graph)), "")
    return chosen.removeprefix("-"), chosen.startswith("-")


def not_sorted(graph: Graph, names: Iterable[str]) -> str:
    """Why the table is not sorted by the metric asked for, with those that there are; empty where it is."""
    asked, known = graph.sort_by.removeprefix("-"), sorted(names)
    if not asked or _found(graph, asked, known):
        return ""
    if not known:
        return f"not sorted by {asked}: no combination has any metric yet"
    near = did_you_mean(asked, known)
    there_are = shortened(f"there are: {', '.join(known)}", MOST_NAMES)
    return f"not sorted by {asked}: no combination has this metric{f'; {near}' if near else ''}; {there_are}"


def _found(graph: Graph, metric: str, names: Collection[str]) -> str:
    """The metric as it is named here; where it stands behind nodes, that of the first in the graph. Empty for none."""
    behind = (f"{shown_id(node)}/{metric}" for node in graph.nodes.values())
    return next((name for name in (metric, *behind) if name in names), "")


def _judged_by(graph: Graph) -> list[str]:
    """Of the ops in the order of the graph."""
    return [node.op.judged_by for node in graph.nodes.values() if node.op.judged_by]
