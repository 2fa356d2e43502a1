"""The runs of a report side by side: differences by node, configs, libraries and devices.

Each run is compared with the first that has a node. Where a run has copies of nodes that another lacks, its
combinations are compared instead, see `columns_of`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen
from markupsafe import Markup

from dsl.errors import StoreError
from executor.explain.run_diff import NodeDiff, Part, compare_parts
from executor.keys.differences import ABSENT, Difference, code_text, is_different
from executor.records.graph_file import recorded_nodes
from executor.report.run_data import NodeFacts, RunFacts, node_ids
from executor.report.templates import faint, limited, render, run_columns, run_name, table
from executor.store.artifact_store import Store
from executor.system.output import shown_digest

WRITTEN = ("config", "setting", "value")
LONG = 10  # characters of a number before it is rounded


@frozen
class _Pair:
    """Two runs that are compared, and the nodes of interest."""

    first: RunFacts
    second: RunFacts
    nodes: Sequence[NodeDiff]

    @property
    def lines(self) -> list[str]:
        return [line_of(diff, self.first.label, self.second.label) for diff in self.nodes if not diff.is_same]

    @property
    def same(self) -> list[str]:
        return [diff.node for diff in self.nodes if diff.is_same]

    @property
    def code(self) -> list[tuple[str, list[str]]]:
        return [(diff.node, list(map(code_text, diff.code))) for diff in self.nodes if diff.code]


def differences(store: Store, runs: Sequence[RunFacts], columns: Sequence[RunFacts]) -> Markup:
    """A table of values, a column for each run; then code, and nodes that are unfinished or only in some runs.

    columns: the runs, with combinations in place of those that have a sweep.

    A run whose record is damaged is named, but not compared.
    """
    damages = [(run, _damage(run)) for run in runs]
    whole = [run for run, damage in damages if not damage]
    names = {run.run for run in whole}
    compared = [column for column in columns if column.run in names] if _has_own_copies(whole) else whole
    bases = {node_id: run.place for run in reversed(compared) for node_id in run.nodes}
    pairs = [pair for run in compared[1:] for pair in _pairs(store, compared, run, bases)]
    values = _values(compared, pairs) if pairs else Markup("")
    damaged = [(run, damage) for run, damage in damages if damage]
    return render("comparison.html", "differences", damaged, values, pairs)


def _has_own_copies(runs: Sequence[RunFacts]) -> bool:
    """Whether some run has a copy that another run lacks; those that all have are compared by their ids."""
    copies = {node.id for run in runs for node in run.nodes.values() if node.template}
    return any(not copies <= run.nodes.keys() for run in runs)


def _part(run: RunFacts) -> Part:
    return Part(run.record, {name: node.id for name, node in run.nodes.items()})


def _damage(run: RunFacts) -> str:
    try:
        run.record.plan()
        recorded_nodes(run.record.folder)
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


def _values(runs: Sequence[RunFacts], pairs: Sequence[_Pair]) -> Markup:
    """Each value that differs in some run; a run without a difference has the value of the base."""
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
        return render("comparison.html", "sentence", "All values that runs share are equal.")
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
                cells.append(render("comparison.html", "other", new) if new not in (None, old) else new)
        rows.append([node, _named(name, list(changes.values())), *cells])
    return table(["node", "value", *map(run_name, runs)], rows)


def _named(name: str, changes: Sequence[Difference]) -> str:
    if any(change.kind == "config" for change in changes):
        return name
    paths = ", ".join(dict.fromkeys(change.path for change in changes if change.path))
    return f"{name} ({changes[0].kind}{f' of {paths}' if paths else ''})"


def line_of(diff: NodeDiff, first: str, second: str) -> str:
    """What differs. first, second: the names of the runs."""
    status = diff.status(first, second)
    if diff.where == "both" and None not in diff.digests:
        digests = dict.fromkeys(map(shown_digest, diff.digests))
        status += f" ({', '.join(digests)}){_because(diff)}"
    return f"{diff.node}: {status}"


def _because(diff: NodeDiff) -> str:
    """Settings outside the key are not a cause: they only change rounding."""
    settings = [change.name for change in diff.values if change.kind == "setting" and not _is_edge(change)]
    causes = [change.name for change in diff.values if change.name not in settings]
    causes += [f"the code: {code_text(change)}" for change in diff.code]
    causes += [f"what it reads from {parent}" for parent in diff.inputs]
    text = f"; what differs: {', '.join(causes)}" if causes else ""
    if diff.unknown:
        text += "; code and libraries are not compared: their record is gone"
    elif not causes:
        text = "; no part of the key differs"
    return f"{text}; settings that are not part of the key: {', '.join(settings)}" if settings else text


def _is_edge(change: Difference) -> bool:
    """Whether it names the nodes that are read."""
    lists = [value if isinstance(value, list) else [value] for value in (change.old, change.new)]
    return any(isinstance(value, str) and value.startswith("@") for values in lists for value in values)


def _cell(difference: Difference, value: Any) -> str | None:
    return None if value is ABSENT else difference.shown(value)


def configs(runs: Sequence[RunFacts]) -> Markup:
    """Each node's values, folded, with the number of those that differ between the runs that have the node."""

    def of_node(node_id: str) -> Markup:
        values = [_config(run.nodes.get(node_id)) for run in runs]
        names = dict.fromkeys(name for of_run in values for name in of_run)
        there = [of_run for run, of_run in zip(runs, values, strict=True) if node_id in run.nodes]
        count = sum(differ([of_run.get(name, ABSENT) for of_run in there]) for name in names)
        node = next(run.nodes[node_id] for run in runs if node_id in run.nodes)
        return render("comparison.html", "config", node, count, compared(runs, values, "value"))

    return limited(node_ids(runs), of_node, has_heads=False)


def environment(runs: Sequence[RunFacts]) -> Markup:
    """Versions of libraries and how the nodes were launched, as the manifests of the artifacts record them."""
    libraries = compared(runs, [_libraries(run) for run in runs], "library")
    launched = [{node.id: _launch(node) for node in run.nodes.values() if node.manifest is not None} for run in runs]
    devices = compared(runs, launched, "node")
    if not devices:
        return faint("No artifact of these runs is present, so versions and devices are not known.")
    return render("comparison.html", "environment", libraries, devices)


def _config(node: NodeFacts | None) -> Mapping[str, Any]:
    if node is None:
        return {}
    return {**node.config, **{f"launch.{name}": value for name, value in node.launch.items()}}


def _libraries(run: RunFacts) -> dict[str, str]:
    """Versions; those of one library in several artifacts, if they differ, one after the other."""
    found: dict[str, list[str]] = {}
    for node in run.nodes.values():
        if node.manifest is not None:
            for name, version in node.manifest.key_parts.libraries.items():
                found.setdefault(name, []).append(str(version))
    return {name: ", ".join(dict.fromkeys(versions)) for name, versions in sorted(found.items())}


def _launch(node: NodeFacts) -> str:
    launch = {} if node.manifest is None else node.manifest.launch
    return ", ".join(f"{name} {value_text(value)}" for name, value in launch.items())


def compared(runs: Sequence[RunFacts], values: Sequence[Mapping[str, Any]], head: str) -> Markup:
    """A row for each name, a column for each run; empty without any."""
    names = dict.fromkeys(name for of_run in values for name in of_run)
    rows = [(name, [of_run.get(name, ABSENT) for of_run in values]) for name in names]
    rows.sort(key=lambda row: not differ(row[1]))
    cells = [[name, *_cells(row)] for name, row in rows]
    if not cells:
        return Markup("")
    return table(run_columns(head, runs), cells)


def differ(values: Sequence[Any]) -> bool:
    """Whether they are not all the same, see `is_different`."""
    return any(is_different(values[0], other) for other in values[1:])


def value_text(value: Any) -> Any:
    """A value of a config or a file as a text, lists and tables as JSON."""
    if value is ABSENT or value is None:
        return None
    if isinstance(value, float) and len(repr(value)) > LONG:
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cells(values: Sequence[Any]) -> list[object]:
    cells = list(map(value_text, values))
    return [render("comparison.html", "changed", cell) for cell in cells] if differ(values) else cells
