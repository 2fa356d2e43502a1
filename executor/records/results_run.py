"""Which run holds the results of a run: the one that MLflow is to have them of."""

from __future__ import annotations

from dsl.graph import Graph
from executor.records.run_record import Record, load_begun


def results_run(record: Record, graph: Graph) -> str | None:
    """The run itself, where a stage ran in it; else the one that made the last node's artifact.

    The combinations of a sweep are another run's where that one made them all and has the same nodes. A sweep that
    brings together what several runs made is a comparison of its own.
    """
    nodes = record.state.nodes
    if record.state.has_run:
        return record.run
    copies = [node_id for node_id, node in graph.nodes.items() if node.copy is not None]
    if not copies:
        return next((node.source_run for node in reversed(nodes.values()) if node.source_run), None)
    results = set(graph.result_nodes)
    makers = {nodes[node_id].source_run for node_id in copies if node_id in results}
    maker = makers.pop() if len(makers) == 1 else None
    other = load_begun(record.folder.parent / maker) if maker is not None else None
    return record.run if other is None or other.state.nodes.keys() != nodes.keys() else maker
