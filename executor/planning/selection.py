"""A part of a pipeline: `--to NODE` is that node and all above it, `--only NODE` these nodes and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dsl.errors import Mistake, PipelineError, known_nodes
from dsl.graph import Graph
from executor.planning.planner import Decision


def selected(graph: Graph, to: str | None, only: Sequence[str]) -> Graph:
    """The part of the graph that is needed. Raises PipelineError for an unknown node."""
    if to is not None and only:
        raise PipelineError([Mistake("--to runs what is above a node, --only does not", hint="give one of them")])
    given = [("--to", to)] if to is not None else [("--only", node_id) for node_id in only]
    mistakes = [
        Mistake(f'{flag}: there is no node "{node_id}"', hint=_near(graph, node_id))
        for flag, node_id in given
        if node_id not in graph.nodes
    ]
    if mistakes:
        raise PipelineError(mistakes)
    return graph.up_to([node_id for _flag, node_id in given]) if given else graph


def require_node(graph: Graph, node_id: str) -> None:
    """Raises PipelineError for an unknown node."""
    if node_id not in graph.nodes:
        raise PipelineError([Mistake(f'there is no node "{node_id}"', hint=known_nodes(node_id, graph.nodes))])


def require_others(decisions: Mapping[str, Decision], only: Collection[str]) -> None:
    """Raises PipelineError if a node would have to run that `--only` does not name."""
    lacking = {node_id: each for node_id, each in decisions.items() if node_id not in only and each.cache != "hit"}
    if only and lacking:
        reasons = "; ".join(f"{node_id} ({decision.reason})" for node_id, decision in lacking.items())
        hint = f"name them too, or run everything above with --to {list(decisions)[-1]}"
        raise PipelineError([Mistake(f"--only: not in the store: {reasons}", hint=hint)])


def _near(graph: Graph, node_id: str) -> str:
    """The nodes that were probably meant; a node with for_each exists only as its copies."""
    copies = [other for other in graph.nodes if other.startswith(f"{node_id}-")]
    if copies:
        return f"its copies: {', '.join(copies)}"
    return known_nodes(node_id, graph.nodes)
