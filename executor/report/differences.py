"""What differs between the runs of a report, each compared with the first that has a node, node by node.

Where a run has copies of nodes that another has not, its combinations stand in its place, see `columns_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from dsl.errors import StoreError
from executor.explain.run_diff import NodeDiff, Part, compare_parts
from executor.keys.code_diff import code_text
from executor.keys.differences import ABSENT, DIGEST_SHOWN, Difference
from executor.records.graph_file import written_nodes
from executor.report.markup import Markup, details, element, joined, paragraph, table
from executor.report.overview import run_name
from executor.report.run_data import RunFacts
from executor.store.artifact_store import Store

WRITTEN = ("config", "setting", "value")


@frozen
class _Pair:
    """Two runs that are compared, and the nodes to be told of."""

    first: RunFacts
    second: RunFacts
    nodes: Sequence[NodeDiff]


def differences(store: Store, runs: Sequence[RunFacts], columns: Sequence[RunFacts]) -> Markup:
    """A table of values, a column for each run; then code, and what is not finished or only in some.

    columns: the runs, with combinations in place of those that have a sweep.

    A run whose record is damaged is named, and compared with none.
    """
    damage = [(run, _damage(run)) for run in runs]
    untold = [paragraph(run_name(run), f" cannot be compared with others: {error}") for run, error in damage if error]
    whole = [run for run, error in damage if not error]
    names = {run.run for run in whole}
    compared = [column for column in columns if column.run in names] if _has_own_copies(whole) else whole
    bases = {node_id: run.place for run in reversed(compared) for node_id in run.nodes}
    pairs = [pair for run in compared[1:] for pair in _pairs(store, compared, run, bases)]
    values = [_values(compared, pairs, bases)] if pairs else []
    return joined([*untold, *values, *map(_rest, pairs)])


def _has_own_copies(runs: Sequence[RunFacts]) -> bool:
    """Whether some run has a copy that another run lacks; those that all have are compared by their ids."""
    copies = {node.id for run in runs for node in run.nodes.values() if node.template}
    return any(not copies <= run.nodes.keys() for run in runs)


def _part(run: RunFacts) -> Part:
    return Part(run.record, {name: node.id for name, node in run.nodes.items()})


def _damage(run: RunFacts) -> str:
    try:
        run.record.plan()
        written_nodes(run.record.folder)
    except StoreError as error:
        return str(error)
    return ""


def _pairs(store: Store, runs: Sequence[RunFacts], run: RunFacts, bases: Mapping[str, int]) -> Iterator[_Pair]:
    """The run against the first one; and each node that the first lacks against the first run that has it, its base."""
    yield _Pair(runs[0], run, compare_parts(store, _part(runs[0]), _part(run)))
    others = {bases[node_id] for node_id in run.nodes} - {runs[0].place, run.place}
    for base in [other for other in runs if other.place in others]:
        nodes = compare_parts(store, _part(base), _part(run))
        yield _Pair(base, run, [diff for diff in nodes if diff.where == "both" and bases[diff.node] == base.place])


def _values(runs: Sequence[RunFacts], pairs: Sequence[_Pair], bases: Mapping[str, int]) -> Markup:
    """Each value that is another one in some run; where a run was not found to differ, it has the one of the base."""
    changed: dict[tuple[str, str, str], dict[int, Difference]] = {}
    unknown = set()
    for pair in pairs:
        for diff in [diff for diff in pair.nodes if diff.where == "both"]:
            if diff.unknown:
                unknown.add((diff.node, pair.second.place))
            for change in diff.values:
                group = "value" if change.kind in WRITTEN else change.kind
                changed.setdefault((diff.node, group, change.name), {})[pair.second.place] = change
    if not changed:
        return paragraph("Every value that several runs have is the same in them.")
    rows = []
    for (node, kind, name), changes in changed.items():
        known = next(iter(changes.values()))
        old = _cell(known, known.old)
        cells: list[Markup | str | None] = []
        for run in runs:
            new = _cell(known, changes[run.place].new) if run.place in changes else old
            if node not in run.nodes:
                cells.append(None)
            elif run.place not in changes and kind != "value" and (node, run.place) in unknown:
                cells.append("not known")
            else:
                cells.append(element("b", new) if new not in (None, old) else new)
        rows.append([node, _named(name, [change.kind for change in changes.values()]), *cells])
    return table(["node", "value", *map(run_name, runs)], rows)


def _named(name: str, kinds: Sequence[str]) -> str:
    return name if "config" in kinds else f"{name} ({kinds[0]})"


def _rest(pair: _Pair) -> Markup:
    labels = (pair.first.label, pair.second.label)
    lines = [line_of(diff, *labels) for diff in pair.nodes if not diff.is_same]
    same = [diff.node for diff in pair.nodes if diff.is_same]
    head = joined([run_name(pair.second), " against ", run_name(pair.first)])
    told_same = f"The same artifact, for the same reasons: {', '.join(same)}." if same else ""
    parts = [element("ul", *(element("li", line) for line in lines)) if lines else "", paragraph(told_same)]
    return joined([element("h3", head), *parts, *_code(pair.nodes)])


def line_of(diff: NodeDiff, first: str, second: str) -> str:
    """What differs. first, second: what the runs are called."""
    status = diff.status(first, second)
    if diff.where == "both" and None not in diff.digests:
        digests = dict.fromkeys((digest or "")[:DIGEST_SHOWN] for digest in diff.digests)
        status += f" ({', '.join(digests)}){_because(diff)}"
    return f"{diff.node}: {status}"


def _because(diff: NodeDiff) -> str:
    """Settings outside the key are no cause: they change results by rounding only."""
    settings = [change.name for change in diff.values if change.kind == "setting" and not _is_edge(change)]
    causes = [change.name for change in diff.values if change.name not in settings]
    causes += [f"the code of {change.name}" for change in diff.code]
    causes += [f"what it reads from {parent}" for parent in diff.inputs]
    text = f"; what differs: {', '.join(causes)}" if causes else ""
    if diff.unknown:
        text += "; code and libraries are not compared: their record is gone"
    elif not causes:
        text = "; no part of the key differs"
    return f"{text}; settings that are not part of the key: {', '.join(settings)}" if settings else text


def _is_edge(change: Difference) -> bool:
    """Whether it names the nodes that are read."""
    values = [*_listed(change.old), *_listed(change.new)]
    return any(isinstance(value, str) and value.startswith("@") for value in values)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _code(diffs: Sequence[NodeDiff]) -> Iterable[Markup]:
    for diff in diffs:
        lines = list(code_text(diff.code, lambda module: module))
        if lines:
            yield details(f"{diff.node}: code", element("pre", "\n".join(lines)))


def _cell(difference: Difference, value: Any) -> str | None:
    return None if value is ABSENT else difference.shown(value)
