"""A part of a pipeline: `--to NODE` is that node and all above it, `--only NODE` these nodes and nothing else.

NODE is a node's id, or that of a node with copies, which selects all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dsl.check import Absent
from dsl.errors import PipelineError, known_nodes
from dsl.finding import Field, Finding
from dsl.graph import Graph
from executor.planning.planner import Decision


def selected(graph: Graph, to: str | None, only: Sequence[str]) -> tuple[Graph, tuple[str, ...]]:
    """The part of the graph that is needed, and the ids of the nodes of `--only`. Raises PipelineError for an unknown
    node.
    """
    if to is not None and only:
        raise PipelineError([Finding("--to runs what is above a node, --only does not", advice="give one of them")])
    given = [("--to", to)] if to is not None else [("--only", node_id) for node_id in only]
    mistakes = [
        Finding(f'{flag}: there is no node "{name}"', advice=known_nodes(name, graph.nodes))
        for flag, name in given
        if not graph.selected_by(name)
    ]
    if mistakes:
        raise PipelineError(mistakes)
    nodes = tuple(node_id for _flag, name in given for node_id in graph.selected_by(name))
    return graph.up_to(nodes) if given else graph, nodes if only else ()


def require_node(graph: Graph, node_id: str) -> None:
    """Raises PipelineError for an unknown node."""
    if node_id not in graph.nodes:
        copies = graph.selected_by(node_id)
        hint = f"its copies: {', '.join(copies)}" if copies else known_nodes(node_id, graph.nodes)
        raise PipelineError([Finding(f'there is no node "{node_id}"', advice=hint)])


def missing_data(decisions: Mapping[str, Decision], absent: Absent) -> list[Finding]:
    """Mistakes about missing files and folders of the nodes that would have to run, and why a record does not do."""
    needed = {node_id: each for node_id, each in decisions.items() if node_id in absent and each.cache != "hit"}
    kept = "bring the data back, or keep what the last run made: dflow resume --from NODE"
    reasons = [
        Finding(f"its artifact in the store is another one: {decision.reason}", Field(f"node.{node_id}"), kept)
        for node_id, decision in needed.items()
        if decision.key is not None
    ]
    return [*(mistake for node_id in needed for mistake in absent[node_id]), *reasons]


def require_others(decisions: Mapping[str, Decision], only: Collection[str]) -> None:
    """Raises PipelineError if a node would have to run that `--only` does not name."""
    lacking = {node_id: each for node_id, each in decisions.items() if node_id not in only and each.cache != "hit"}
    if only and lacking:
        reasons = "; ".join(f"{node_id} ({decision.reason})" for node_id, decision in lacking.items())
        hint = f"name them too, or run everything above with --to {list(decisions)[-1]}"
        if all(decision.reason != "new" for decision in lacking.values()):
            hint += f"; to keep what the last run made: dflow resume --from {next(iter(only))}"
        raise PipelineError([Finding(f"--only: not in the store: {reasons}", advice=hint)])
