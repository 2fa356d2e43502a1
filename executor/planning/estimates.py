"""What the nodes of a graph need, estimated by their ops in the order of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from dsl.encoding import fingerprint
from dsl.errors import DflowError, NotKnown
from dsl.estimate import PROMISED, Estimate, PlanContext, Trial
from dsl.graph import Graph, GraphNode
from dsl.hooks import hook
from dsl.sizes import shown_bytes
from executor.keys.node_key import key_config
from executor.records.run_record import NodeState
from executor.system.resource_pool import computes_on_gpu, devices

NO_TRIALS: Mapping[str, Trial] = {}
NOT_MEASURED: Mapping[str, int | None] = {}


@frozen
class Estimates:
    """Of every node whose op gives an estimate: what it needs. forecast: of its output, None where nothing is known.

    refused: why an op gives none, where a value is wrong.
    """

    needs: Mapping[str, Estimate]
    forecast: Mapping[str, Any]
    refused: Mapping[str, str]


def graph_estimates(
    graph: Graph, made: Mapping[str, Path], free_disk: int, trials: Mapping[str, Trial] = NO_TRIALS
) -> Estimates:
    """The estimates of a graph. made: where the store holds artifacts, by node id.

    A node whose artifact exists needs nothing, but its readers use its estimate. What an op does not know becomes a
    note. Hooks see device = "cpu" where the node computes on the CPU.
    """
    needs: dict[str, Estimate] = {}
    forecast: dict[str, Any] = dict.fromkeys(graph.nodes)
    refused: dict[str, str] = {}
    identities: dict[str, str] = {}
    for node_id, node in graph.nodes.items():
        identities[node_id] = _identity(node, made.get(node_id), identities)
        estimate: Callable[[Any, PlanContext], Estimate | None] | None = hook(node.op, "estimate")
        if estimate is None:
            continue
        on_gpu = _computes_on_gpu_here(node)
        context = PlanContext(
            launch=node.launch if on_gpu else attrs.evolve(node.launch, device="cpu"),
            inputs=node.by_edge(forecast),
            artifact=made.get(node_id),
            root=graph.root,
            free_disk=free_disk,
            trial=trials.get(node_id),
            identity=identities[node_id],
        )
        try:
            needed = estimate(node.config, context)
        except NotKnown as error:
            needed = Estimate(notes=(f"what it needs cannot be estimated: {error}",))
        except DflowError as error:
            refused[node_id] = str(error)
            continue
        if needed is not None:
            forecast[node_id] = needed.forecast
            needs[node_id] = Estimate(growth=needed.growth) if node_id in made else needed
    return Estimates(needs, forecast, refused)


def _identity(node: GraphNode, artifact: Path | None, identities: Mapping[str, str]) -> str:
    """As `PlanContext.identity`. An artifact's folder has its digest as its name."""
    if artifact is not None:
        return artifact.name
    inputs = {edge: [identities[parent] for parent in parents] for edge, parents in node.inputs.items()}
    paths = {field.name: getattr(node.config, field.name) for field in node.op.fields.values() if field.external}
    parts = {"op": node.op.name, "config": key_config(node), "paths": paths, "inputs": inputs}
    return PROMISED + fingerprint(parts)


def _computes_on_gpu_here(node: GraphNode) -> bool:
    """Whether the node will compute on a GPU: on a cluster, wherever it may."""
    is_chosen = node.launch.device == "cuda" or node.launch.kind == "ray"
    return computes_on_gpu(node) and (is_chosen or bool(devices()))


def estimate_row(need: Estimate, measured: int | None = None) -> dict[str, Any]:
    """What `dflow plan --json` shows of a node; sizes in bytes. measured: as of `measured_memory`."""
    return {
        "memory": dict(need.memory),
        "memory_total": sum(need.memory.values()),
        "memory_measured": measured,
        "disk": dict(need.disk),
        "disk_total": sum(need.disk.values()),
        "disk_per": need.disk_per,
        "notes": list(need.notes),
    }


def measured_memory(node: GraphNode, last: NodeState | None) -> int | None:
    """The peak bytes of one rank when the node was computed last: on its GPU, or of the process where it has none."""
    if last is None:
        return None
    peak = last.gpu_memory if _computes_on_gpu_here(node) else last.memory
    return None if peak is None else peak // node.launch.world_size


def too_large(
    graph: Graph,
    needs: Mapping[str, Estimate],
    gpu_memory: Callable[[], int | None],
    memory: int,
    measured: Mapping[str, int | None] = NOT_MEASURED,
) -> list[str]:
    """A line for each node whose ranks do not fit on this machine, by what they hold and by what they took last.

    gpu_memory: bytes of the smallest GPU here, None where that is unknown. memory: bytes of the machine, for ranks that
    compute on the CPU; a node on several hosts has nproc ranks on each. measured: as of `measured_memory`.
    """
    held = {node_id: sum(need.memory.values()) for node_id, need in needs.items()}
    needed = {node_id: most for node_id, size in held.items() if (most := max(size, measured.get(node_id) or 0))}
    has_gpus = bool(needed) and bool(devices())
    gpu = gpu_memory() if has_gpus else None
    lines = []
    for node_id, size in needed.items():
        node = graph.nodes[node_id]
        ranks = node.launch.nproc
        if has_gpus and computes_on_gpu(node):
            if gpu is not None and size > gpu:
                has = f"each rank needs {shown_bytes(size)}, and a GPU here has {shown_bytes(gpu)}"
                lines.append(f"{node_id}: memory: DOES NOT FIT: {has}")
        elif ranks * size > memory:
            each = shown_bytes(size) if ranks == 1 else f"{ranks} ranks of {shown_bytes(size)} each"
            lines.append(f"{node_id}: memory: DOES NOT FIT: needs {each}, and this machine has {shown_bytes(memory)}")
    return lines
