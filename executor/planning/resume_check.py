"""Before a run is resumed: the artifacts that it will read are intact, or it makes them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsl.graph import Graph
from executor.records.run_record import Record
from executor.store.artifact_store import Store
from executor.store.integrity import check, set_aside


def check_inputs(
    store: Store, record: Record, start: str | None, overrides: Sequence[str], report: Callable[[str], None]
) -> None:
    """Verify the inputs of the nodes that will run, see store/integrity.py; set aside and report damaged ones.

    start: the node of --from, or the one whose copies are. Raises StoreError if a damaged artifact cannot be set aside.
    """
    graph = record.graph()
    rerun = _rerun_nodes(graph, record, start, overrides)
    checked: set[str] = set()
    while True:
        parents = {parent for node_id in rerun for parent in graph.nodes[node_id].parents if parent not in rerun}
        digests = {node_id: record.state.nodes[node_id].digest for node_id in graph.nodes if node_id in parents}
        unchecked = {digest for digest in digests.values() if digest is not None} - checked
        if not unchecked:
            return
        checked |= unchecked
        damages = check(store, sorted(unchecked))
        set_aside(store, damages)
        for node_id, digest in digests.items():
            if digest in damages:
                rerun.add(node_id)  # so that its inputs are checked as well
                report(f'the artifact of node "{node_id}" was damaged after its commit: {damages[digest][-1]}')


def _rerun_nodes(graph: Graph, record: Record, start: str | None, overrides: Sequence[str]) -> set[str]:
    """The nodes that may run. Unknown names are ignored: planning reports them."""
    if start is not None:
        return {below for node_id in graph.selected_by(start) for below in graph.below(node_id)}
    changed = {override.partition(".")[0].strip() for override in overrides}
    unfinished = {node_id for node_id, node in record.state.nodes.items() if node.state != "done"}
    return unfinished.union(*(graph.below(node_id) for node_id in sorted(changed) if node_id in graph.nodes))
