"""The plan as `dflow plan --json` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsl.graph import Graph
from executor.plan import Decision


def plan_rows(graph: Graph, decisions: Mapping[str, Decision]) -> list[dict[str, Any]]:
    return [
        {
            "id": node_id,
            "op": graph.nodes[node_id].op.name,
            "key": decision.key,
            "digest": decision.digest,
            "state": "done" if decision.cache == "hit" else "pending",
            "cache": decision.cache,
            "reason": decision.reason,
            "seconds": None,
            "mlflow_run_id": None,
        }
        for node_id, decision in decisions.items()
    ]
