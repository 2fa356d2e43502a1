"""What the nodes that will run need of this machine and is not there, asked of their ops before anything runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from dsl.errors import Mistake, PipelineError
from dsl.graph import Graph, GraphNode
from executor.plan import Decision, Planner


def unmet(graph: Graph, decisions: Mapping[str, Decision]) -> list[Mistake]:
    """Of all nodes that are not cached, in the order of the data."""
    return [
        Mistake(sentence, f"node.{node_id}.{field}")
        for node_id, decision in decisions.items()
        if decision.cache != "hit"
        for field, sentence in _of_node(graph.nodes[node_id]).items()
    ]


def require_met(planner: Planner) -> None:
    """Raises PipelineError with all that is not there, before there is a record, and StoreError for a lost artifact."""
    missing = unmet(planner.graph, planner.plan())
    if missing:
        raise PipelineError(missing)


def _of_node(node: GraphNode) -> Mapping[str, str]:
    if node.op.unmet is None:
        return {}
    module, _, name = node.op.unmet.partition(":")
    function: Callable[[Any], Mapping[str, str]] = getattr(importlib.import_module(module), name)
    return function(node.config)
