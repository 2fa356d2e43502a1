"""The configs of all nodes and what they ran with: libraries, devices, processes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from executor.report.facts import NodeFacts, RunFacts
from executor.report.markup import Markup, details, element, joined, paragraph, table
from executor.report.overview import run_name

ABSENT = object()


def configs(runs: Sequence[RunFacts]) -> Markup:
    """Each node's values, folded away; those that differ between runs come first and are marked."""
    blocks = []
    for node_id in dict.fromkeys(node_id for run in runs for node_id in run.nodes):
        values = [_config(run.nodes.get(node_id)) for run in runs]
        rows, differing = _rows(runs, values)
        op = next(run.nodes[node_id].op for run in runs if node_id in run.nodes)
        head = joined([element("b", node_id), f" {op}", f", {differing} differ" if differing else ""])
        blocks.append(details(head, table(["value", *_heads(runs)], rows)))
    return joined(blocks)


def environment(runs: Sequence[RunFacts]) -> Markup:
    """Versions of libraries and how the nodes were launched, as the manifests of the artifacts record them."""
    libraries = [_libraries(run) for run in runs]
    rows, _ = _rows(runs, libraries)
    if not rows:
        return paragraph("No artifact is there that tells of versions and devices.", class_="faint")
    launched = [
        [node.id, *(_launch(run.nodes.get(node.id)) for run in runs)]
        for node in {node.id: node for run in runs for node in run.nodes.values()}.values()
    ]
    return joined(
        [
            table(["library", *_heads(runs)], rows),
            details("devices and processes", table(["node", *_heads(runs)], launched)),
        ]
    )


def _heads(runs: Sequence[RunFacts]) -> list[object]:
    return [run_name(run) for run in runs] if len(runs) > 1 else [""]


def _rows(runs: Sequence[RunFacts], values: Sequence[Mapping[str, Any]]) -> tuple[list[list[object]], int]:
    """A row for each name, those with different values first, and how many those are."""
    names = dict.fromkeys(name for of_run in values for name in of_run)
    differing: list[list[object]] = []
    alike: list[list[object]] = []
    for name in names:
        cells = [_shown(of_run.get(name, ABSENT)) for of_run in values]
        is_other = len(set(cells)) > 1
        shown = [element("b", cell, class_="change") if is_other else cell for cell in cells]
        (differing if is_other else alike).append([name, *shown])
    return differing + alike, len(differing)


def _config(node: NodeFacts | None) -> Mapping[str, Any]:
    if node is None:
        return {}
    return {**node.config, **{f"launch.{name}": value for name, value in node.launch.items()}}


def _libraries(run: RunFacts) -> dict[str, str]:
    """Versions; those of one library in several artifacts, if they differ, beside each other."""
    found: dict[str, list[str]] = {}
    for node in run.nodes.values():
        for name, version in (node.manifest or {}).get("key_parts", {}).get("libraries", {}).items():
            found.setdefault(name, []).append(str(version))
    return {name: ", ".join(dict.fromkeys(versions)) for name, versions in sorted(found.items())}


def _launch(node: NodeFacts | None) -> str | None:
    launch = (node.manifest or {}).get("launch", {}) if node is not None else {}
    return ", ".join(f"{name} {_shown(value)}" for name, value in launch.items()) or None


def _shown(value: Any) -> str | None:
    if value is ABSENT or value is None:
        return None
    if isinstance(value, dict) and value.keys() == {"ref"}:
        return f"@{value['ref']}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
