"""The configs of all nodes and what they ran with: libraries, devices, processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from executor.keys.differences import ABSENT
from executor.report.columns import node_ids
from executor.report.compared import compared, differ, shown
from executor.report.markup import Markup, details, element, joined, limited, paragraph
from executor.report.run_data import NodeFacts, RunFacts


def configs(runs: Sequence[RunFacts]) -> Markup:
    """Each node's values, folded away; how many differ between the runs that have the node stands outside."""

    def of_node(node_id: str) -> Markup:
        values = [_config(run.nodes.get(node_id)) for run in runs]
        names = dict.fromkeys(name for of_run in values for name in of_run)
        there = [of_run for run, of_run in zip(runs, values, strict=True) if node_id in run.nodes]
        differing = sum(differ([of_run.get(name, ABSENT) for of_run in there]) for name in names)
        node = next(run.nodes[node_id] for run in runs if node_id in run.nodes)
        origin = f", a copy of {node.template}" if node.template else ""
        head = joined([element("b", node_id), f" {node.op}{origin}", f", {differing} differ" if differing else ""])
        return details(head, compared(runs, values, "value"))

    return limited(node_ids(runs), of_node, has_heads=False)


def environment(runs: Sequence[RunFacts]) -> Markup:
    """Versions of libraries and how the nodes were launched, as the manifests of the artifacts record them."""
    libraries = compared(runs, [_libraries(run) for run in runs], "library")
    launched = [{node.id: _launch(node) for node in run.nodes.values() if node.manifest is not None} for run in runs]
    devices = compared(runs, launched, "node")
    if not devices:
        return paragraph("No artifact is there that tells of versions and devices.", class_="faint")
    return joined([libraries, details("devices and processes", devices)])


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


def _launch(node: NodeFacts) -> str:
    launch = (node.manifest or {}).get("launch", {})
    return ", ".join(f"{name} {shown(value)}" for name, value in launch.items())
