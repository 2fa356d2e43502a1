"""What the nodes of a graph need, asked of their ops in the order of the data."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsl.errors import DflowError
from dsl.graph import Graph, GraphNode
from dsl.resources import Outlook, Resources, load_resources
from dsl.sizes import shown_bytes
from executor.system.resource_pool import computes_on_gpu, devices


def graph_resources(graph: Graph, made: Mapping[str, Path], free_disk: int) -> dict[str, Resources]:
    """The resources of every node whose op tells them. made: where the store holds artifacts, by node id.

    A node that is made needs nothing more, but its readers learn from it. What an op refuses becomes a note.
    """
    told: dict[str, Resources] = {}
    for node_id, node in graph.nodes.items():
        function = load_resources(node.op)
        if function is None:
            continue
        outlook = Outlook(
            config=node.config,
            launch=node.launch,
            inputs=_foreseen(node, told),
            artifact=made.get(node_id),
            root=graph.root,
            free_disk=free_disk,
        )
        try:
            needed = function(outlook)
        except DflowError as error:
            needed = Resources(notes=(f"what it needs cannot be told: {error}",))
        told[node_id] = Resources(foreseen=needed.foreseen) if node_id in made else needed
    return told


def resources_row(need: Resources) -> dict[str, Any]:
    """What `dflow plan --json` says of a node; sizes in bytes."""
    return {
        "memory": dict(need.memory),
        "memory_total": sum(need.memory.values()),
        "disk": dict(need.disk),
        "disk_total": sum(need.disk.values()),
        "disk_per": need.disk_per,
        "notes": list(need.notes),
    }


def too_large_for_gpus(graph: Graph, needs: Mapping[str, Resources], gpu_memory: Callable[[], int | None]) -> list[str]:
    """A line for each node that computes on a GPU and needs more memory than the smallest one here has."""
    needed = {node_id: sum(need.memory.values()) for node_id, need in needs.items() if need.memory}
    on_gpu = {node_id: size for node_id, size in needed.items() if computes_on_gpu(graph.nodes[node_id])}
    there = gpu_memory() if on_gpu and devices() else None
    if there is None:
        return []
    return [
        f"{node_id}: memory: DOES NOT FIT: each rank needs {shown_bytes(size)}, and a GPU here has {shown_bytes(there)}"
        for node_id, size in on_gpu.items()
        if size > there
    ]


def free_bytes(folder: Path) -> int:
    """Free disk where a folder lies, or would lie: that of the nearest folder above that is there."""
    here = folder.absolute()
    return shutil.disk_usage(next(place for place in (here, *here.parents) if place.exists())).free


def _foreseen(node: GraphNode, told: Mapping[str, Resources]) -> dict[str, Any]:
    """By edge, what the producers foresee of their outputs."""
    inputs: dict[str, Any] = {}
    for name, edge in node.op.edges.items():
        producers = [told[parent].foreseen if parent in told else None for parent in node.inputs.get(name, ())]
        inputs[name] = tuple(producers) if edge.many else next(iter(producers), None)
    return inputs
