"""The plan as `dflow plan --json` shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dsl.graph import Graph
from executor.planning.planner import Decision


def plan_rows(
    graph: Graph, decisions: Mapping[str, Decision], seconds: Callable[[str], float | None]
) -> list[dict[str, Any]]:
    """seconds: how long a node took the last time."""
    return [
        {
            "id": node_id,
            "op": graph.nodes[node_id].op.name,
            "key": decision.key,
            "digest": decision.digest,
            "state": "done" if decision.cache == "hit" else "pending",
            "cache": decision.cache,
            "reason": decision.reason,
            "seconds": seconds(node_id),
            "mlflow_run_id": None,
        }
        for node_id, decision in decisions.items()
    ]
