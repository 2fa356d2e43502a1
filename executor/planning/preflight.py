"""What the nodes that will run lack on this machine or in their files, as their ops report it before anything runs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dsl.errors import Mistake
from dsl.graph import Graph, GraphNode
from dsl.hooks import hook
from executor.planning.planner import Decision


def unmet(graph: Graph, decisions: Mapping[str, Decision], made: Mapping[str, Path]) -> list[Mistake]:
    """The mistakes of tracking, then those of all nodes that are not cached, in the order of the graph. made: where the
    store holds artifacts, by node id.
    """
    running = {node_id: graph.nodes[node_id] for node_id, decision in decisions.items() if decision.cache != "hit"}
    lacking = _of_tracking(graph) if running else []
    unfit = _unfit(graph, running, made)
    of_nodes = (
        Mistake(sentence, f"node.{node_id}.{field}")
        for node_id, node in running.items()
        for found in (_of_node(node), unfit.get(node_id, {}))
        for field, sentences in found.items()
        for sentence in sentences.splitlines()
    )
    lacking += dict.fromkeys(of_nodes)
    asking = {node_id: node for node_id, node in running.items() if _asks_for_something(node)}
    if not asking:  # the usual case: the hardware is not queried
        return lacking
    from executor.launchers.backends import Backends

    return lacking + Backends(graph.machine).check(asking)


def nodes_of(graph: Graph, mistakes: Iterable[Mistake]) -> set[str]:
    """The nodes that have a mistake in one of their fields."""
    owners = {mistake.path.rpartition(".")[0] for mistake in mistakes}
    return {node_id for node_id in graph.nodes if f"node.{node_id}" in owners}


def _of_tracking(graph: Graph) -> list[Mistake]:
    """MLflow is missing, though runs are tracked: reported before hours of work, not after them."""
    if not graph.tracking or importlib.util.find_spec("mlflow") is not None:
        return []
    hint = "install it (pip install mlflow), or run without tracking: -s mlflow.tracking=false"
    return [Mistake("mlflow is not installed here, so the run cannot be tracked", "mlflow.tracking", hint=hint)]


def _asks_for_something(node: GraphNode) -> bool:
    launch = node.launch
    by_ranks = launch.device == "cuda" or (node.op.gpu and launch.device == "auto" and launch.nproc > 1)
    return any((launch.cpus, launch.gpus, launch.memory, launch.kind == "ray", launch.shard_workers > 1, by_ranks))


def _unfit(graph: Graph, running: Mapping[str, GraphNode], made: Mapping[str, Path]) -> dict[str, Mapping[str, str]]:
    """What does not fit the inputs of nodes, by node; only ops with the hook are asked."""
    asked: dict[str, Callable[[Any, Mapping[str, Any]], Mapping[str, str]]] = {
        node_id: found for node_id, node in running.items() if (found := hook(node.op, "unfit")) is not None
    }
    if not asked:
        return {}
    from executor.planning.estimates import foreseen_inputs  # only where a node asks

    inputs = foreseen_inputs(graph, made, asked)
    return {node_id: unfit(graph.nodes[node_id].config, inputs[node_id]) for node_id, unfit in asked.items()}


def _of_node(node: GraphNode) -> Mapping[str, str]:
    lacking: Callable[[Any], Mapping[str, str]] | None = hook(node.op, "unmet")
    return {} if lacking is None else lacking(node.config)
