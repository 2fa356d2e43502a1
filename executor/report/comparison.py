"""The runs of a report side by side: what differs, by the text of `dflow diff`; configs, libraries and devices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from dsl.errors import StoreError
from executor.explain.run_diff import compare_runs, runs_text
from executor.keys.differences import ABSENT, is_different
from executor.records.graph_file import recorded_nodes
from executor.report.run_data import NodeFacts, RunFacts, node_ids
from executor.report.templates import faint, joined, limited, render, run_columns, table
from executor.store.artifact_store import Store

LONG = 10  # characters of a number before it is rounded


def differences(store: Store, runs: Sequence[RunFacts]) -> Markup:
    """Each run against the first. A run whose record is damaged is named, but not compared."""
    damages = [(run, _damage(run)) for run in runs]
    parts = [
        render("sentence", f"{run.label} cannot be compared with others: {damage}") for run, damage in damages if damage
    ]
    whole = [run for run, damage in damages if not damage]
    for run in whole[1:]:
        text = runs_text(whole[0].record, run.record, compare_runs(store, whole[0].record, run.record))
        parts.append(render("headed", f"{run.label} against {whole[0].label}", render("text", text)))
    return joined(parts)


def _damage(run: RunFacts) -> str:
    try:
        run.record.plan()
        recorded_nodes(run.record.folder)
    except StoreError as error:
        return str(error)
    return ""


def configs(runs: Sequence[RunFacts]) -> Markup:
    """Each node's values, folded, with the number of those that differ between the runs that have the node."""

    def of_node(node_id: str) -> Markup:
        values = [_config(run.nodes.get(node_id)) for run in runs]
        names = dict.fromkeys(name for of_run in values for name in of_run)
        there = [of_run for run, of_run in zip(runs, values, strict=True) if node_id in run.nodes]
        count = sum(differ([of_run.get(name, ABSENT) for of_run in there]) for name in names)
        node = next(run.nodes[node_id] for run in runs if node_id in run.nodes)
        copy = f", a copy of {node.template}" if node.template else ""
        head = f"{node.id} {node.op}{copy}{f', {count} differ' if count else ''}"
        return render("folded", head, compared(runs, values, "value"))

    return limited(node_ids(runs), of_node, has_heads=False)


def environment(runs: Sequence[RunFacts]) -> Markup:
    """Versions of libraries and how the nodes were launched, as the manifests of the artifacts record them."""
    libraries = compared(runs, [_libraries(run) for run in runs], "library")
    launched = [{node.id: _launch(node) for node in run.nodes.values() if node.manifest is not None} for run in runs]
    devices = compared(runs, launched, "node")
    if not devices:
        return faint("No artifact of these runs is present, so versions and devices are not known.")
    return joined([libraries, render("folded", "devices and processes", devices)])


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
    """A row for each name, a column for each run, those that differ first; empty without any."""
    names = dict.fromkeys(name for of_run in values for name in of_run)
    rows = [(name, [of_run.get(name, ABSENT) for of_run in values]) for name in names]
    rows.sort(key=lambda row: not differ(row[1]))
    cells = [[name, *_cells(row)] for name, row in rows]
    return table(run_columns(head, runs), cells) if cells else Markup("")


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
    return [render("emphasized", cell, "change") for cell in cells] if differ(values) else cells
