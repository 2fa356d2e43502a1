"""What the nodes that will run lack on this machine or in their files, as their ops report it before anything runs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dsl.finding import Field, Finding
from dsl.graph import Graph, GraphNode
from dsl.hooks import hook
from executor.planning.planner import Decision, cached_artifacts

if TYPE_CHECKING:
    from executor.planning.estimates import Estimates
    from executor.store.artifact_store import Store


def preflight(
    store: Store, graph: Graph, decisions: Mapping[str, Decision], free_disk: int
) -> tuple[list[Finding], Estimates | None]:
    """All mistakes by which a run would be refused, and the estimates of the graph; no hook is loaded and nothing
    estimated where all is cached.
    """
    if all(decision.cache == "hit" for decision in decisions.values()):
        return [], None
    from executor.planning.disk_check import disk_mistakes
    from executor.planning.estimates import graph_estimates

    estimates = graph_estimates(graph, cached_artifacts(store, decisions), free_disk)
    lacking = _missing_here(graph, decisions, estimates)
    return lacking + disk_mistakes(store, decisions, estimates.needs, free_disk), estimates


def _missing_here(graph: Graph, decisions: Mapping[str, Decision], estimates: Estimates) -> list[Finding]:
    """The mistakes of tracking, then those of all nodes that are not cached, in the order of the graph."""
    running = {node_id: graph.nodes[node_id] for node_id, decision in decisions.items() if decision.cache != "hit"}
    lacking = _of_tracking(graph)
    for node in running.values():
        found = dict.fromkeys(_of_node(node, estimates))
        if not found and node.id in estimates.refused:
            found = dict.fromkeys(
                Finding(line, Field(f"node.{node.id}")) for line in _lines(estimates.refused[node.id])
            )
        lacking += found
    asking = {node_id: node for node_id, node in running.items() if _asks_for_something(node)}
    if not asking:  # the usual case: the hardware is not queried
        return lacking
    from executor.launchers.backends import Backends

    return lacking + Backends(graph.machine).check(asking)


def _of_tracking(graph: Graph) -> list[Finding]:
    """MLflow is missing, though runs are tracked: reported before hours of work, not after them."""
    if not graph.tracking or importlib.util.find_spec("mlflow") is not None:
        return []
    hint = "install it (pip install mlflow), or run without tracking: -s mlflow.tracking=false"
    return [Finding("mlflow is not installed here, so the run cannot be tracked", Field("mlflow.tracking"), hint)]


def _asks_for_something(node: GraphNode) -> bool:
    launch = node.launch
    by_ranks = launch.device == "cuda" or (node.op.gpu and launch.device == "auto" and launch.nproc > 1)
    return any((launch.cpus, launch.gpus, launch.memory, launch.kind == "ray", launch.shard_workers > 1, by_ranks))


def _of_node(node: GraphNode, estimates: Estimates) -> Iterator[Finding]:
    """What it lacks by itself, then what does not fit its inputs."""
    lacking: Callable[[Any], Mapping[str, str]] | None = hook(node.op, "missing_here")
    conflicts: Callable[[Any, Mapping[str, Any]], Mapping[str, str]] | None = hook(node.op, "conflicts")
    for found in (
        {} if lacking is None else lacking(node.config),
        {} if conflicts is None else conflicts(node.config, node.by_edge(estimates.forecast)),
    ):
        for field, sentences in found.items():
            yield from (Finding(sentence, Field(f"node.{node.id}.{field}")) for sentence in sentences.splitlines())


def _lines(text: str) -> list[str]:
    """An error's lines; a first one that only introduces the others is left out."""
    first, *others = text.splitlines() or [""]
    return [line.strip() for line in others] if others and first.endswith(":") else [text]
