"""The plan as text and as JSON: what is cached, what runs and why, and what it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsl.graph import Graph
from dsl.sizes import shown_bytes
from executor.planning.planner import WORDS, Decision
from executor.system.output import columns, print_lines, shown_digest

if TYPE_CHECKING:
    from dsl.estimate import Estimate
    from executor.records.run_record import NodeState


def print_plan(graph: Graph, decisions: Mapping[str, Decision], missing: Sequence[str], note: str) -> None:
    """Print the plan as a table: cached nodes, those that will run and why, and those that may stay cached.

    A note and the missing inputs follow.
    """
    rows = [
        (node_id, graph.nodes[node_id].op.name, WORDS[each.cache], shown_digest(each.digest), each.reason)
        for node_id, each in decisions.items()
    ]
    print_lines(columns(("node", "op", "plan", "digest", "why"), rows))
    if any(decision.cache == "maybe" for decision in decisions.values()):
        print_lines(f"\n{WORDS['maybe']}: runs unless its inputs come out the same")
    if note:
        print_lines(f"\n{note}")
    if missing:
        print_lines("\n".join(["", "missing or wrong, so `dflow run` would refuse to start:", *missing]))


def print_estimates(
    graph: Graph,
    needs: Mapping[str, Estimate],
    measured: Mapping[str, int | None],
    free_disk: int,
    store: Path,
) -> None:
    """Print the memory of a rank, its peak in the last run, and the disk space of each node, then details and notes.

    Prints nothing if no op gives an estimate.
    """
    rows = []
    details = []
    for node_id, need in needs.items():
        if need.memory or need.disk:
            took = measured.get(node_id)
            last = "" if took is None else shown_bytes(took)
            rows.append((node_id, str(graph.nodes[node_id].launch.world_size), _total(need.memory), last, _disk(need)))
        for kind, parts in (("memory", need.memory), ("disk", need.disk)):
            if len(parts) > 1:
                details.append(f"{node_id}: {kind}: {_parts(parts)}")
        details += [f"{node_id}: {note}" for note in need.notes]
    if rows:
        header = ("node", "ranks", "held each", "took last", "disk")
        print_lines("\n" + columns(header, rows, right=header[1:]))
        print_lines(
            "held each: weights, gradients and optimizer state of a rank, on its GPU or else in memory, without what a "
            "pass keeps; took last: its peak when the node ran last; --smoke measures it before a full run"
        )
        print_lines(f"{shown_bytes(free_disk)} of disk are free at {store}")
    for line in details:
        print_lines(line)


def plan_rows(
    graph: Graph, decisions: Mapping[str, Decision], computed: Callable[[str], NodeState | None]
) -> list[dict[str, Any]]:
    """The rows of `dflow plan --json`. computed: a node as it was computed last."""
    return [
        {
            "id": node_id,
            "op": graph.nodes[node_id].op.name,
            "key": decision.key,
            "digest": decision.digest,
            "state": "done" if decision.cache == "hit" else "pending",
            "cache": decision.cache,
            "reason": decision.reason,
            "seconds": None if (last := computed(node_id)) is None else last.seconds,
            "mlflow_run_id": None,
        }
        for node_id, decision in decisions.items()
    ]


def _total(parts: Mapping[str, int]) -> str:
    return shown_bytes(sum(parts.values())) if parts else ""


def _disk(need: Estimate) -> str:
    return _total(need.disk) + (f" for {need.disk_per}" if need.disk_per else "")


def _parts(parts: Mapping[str, int]) -> str:
    """The parts of an estimate as text, the largest first."""
    ordered = sorted(((size, name) for name, size in parts.items() if size), reverse=True)
    return ", ".join(f"{name} {shown_bytes(size)}" for size, name in ordered)
