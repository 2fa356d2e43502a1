"""Whether what nodes are known to write fits on the disk of the store: before a run, and before each of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dsl.errors import DiskFull
from dsl.estimate import CHECKPOINTS, Estimate
from dsl.finding import Field, Finding
from dsl.graph import Graph
from dsl.hooks import hook
from dsl.json_files import read_object
from dsl.os_errors import free_bytes
from dsl.sizes import shown_bytes
from executor.planning.estimates import graph_estimates
from executor.planning.planner import Decision
from executor.store.artifact_store import Store
from executor.system.disk_space import folder_size


def disk_mistakes(
    store: Store, decisions: Mapping[str, Decision], needs: Mapping[str, Estimate], free: int
) -> list[Finding]:
    """A mistake for each node that will run and whose output does not fit beside those of the nodes before it."""
    mistakes, before = [], 0
    for node_id, decision in decisions.items():
        need = needs.get(node_id, Estimate())
        size = known_size(need)
        if decision.cache != "miss" or not size:
            continue
        if before + size > free:
            size = max(0, size - _unfinished_work(store, node_id))
        if before + size > free:
            mistakes.append(Finding(_lack(need, size, free, store.path, before), Field(f"node.{node_id}")))
        else:
            before += size - need.disk.get(CHECKPOINTS, 0)
    return mistakes


def check_space(graph: Graph, node_id: str, made: Mapping[str, Path], work_dir: Path) -> None:
    """Raises DiskFull where the node, which is about to start, is known to write more than is free at its work folder.

    made: the artifacts of the nodes above it.
    """
    if hook(graph.nodes[node_id].op, "estimate") is None:
        return
    free = free_bytes(work_dir)
    need = graph_estimates(graph.up_to([node_id]), made, free).needs.get(node_id, Estimate())
    size = known_size(need)
    if size > free:
        size -= folder_size(work_dir)
    if size > free:
        raise DiskFull(_lack(need, size, free, work_dir))


def known_size(need: Estimate) -> int:
    """Bytes; 0 where the amount of data is not known."""
    return 0 if need.disk_per else sum(need.disk.values())


def _unfinished_work(store: Store, node_id: str) -> int:
    """Bytes of what earlier attempts at the node left, which a run may continue."""
    work = store.path / "work"
    folders = [file.parent for file in work.glob("*/work.json") if (read_object(file) or {}).get("node") == node_id]
    return sum(map(folder_size, folders))


def _lack(need: Estimate, size: int, free: int, place: Path, before: int = 0) -> str:
    """size: bytes that are still to be written. before: what the nodes before it write."""
    shared = f" ({shown_bytes(before)} of that for the nodes before it)" if before else ""
    less = f", or write less: {need.less_disk}" if need.less_disk else ""
    return (
        f"needs {shown_bytes(size)} of disk ({' and '.join(need.disk)}), and {shown_bytes(free)} are free at "
        f"{place}{shared}: free space there (`dflow gc --usage` shows what uses it, `dflow gc` removes what nothing "
        f"uses), use another store (--store){less}"
    )
