"""`dflow doctor --backends`: whether both capture backends give the same states; worth knowing before training."""

from __future__ import annotations

from dsl.errors import PipelineError, StoreError, did_you_mean
from dsl.finding import Finding
from dsl.graph import Graph
from executor.model_tools.computation import Result, computed
from executor.planning.session import make_planner
from executor.store.artifact_store import Store

CAPTURE = "capture_targets"
ENTRY = "ops.tools.compare_backends.run"


def compare(store: Store, graph: Graph, node_id: str | None, samples: int) -> list[Result]:
    """Each capture node of a graph (or the one that is named), compared on a few of its samples.

    Raises DataError where SGLang is missing or another version, PipelineError where there is no such node, and
    StoreError where its tokens or its target are not in the store.
    """
    if samples < 1:
        raise PipelineError([Finding(f"--samples {samples}: must be 1 or more")])
    from ops.lib.sglang.version import require_sglang  # here: the command checks first whose `ops` this is

    require_sglang("doctor --backends")
    nodes = _capture_nodes(graph, node_id)
    decisions = make_planner(store, graph).plan()
    made = {name: decision.digest for name, decision in decisions.items() if decision.cache == "hit"}
    for name in nodes:
        missing = [parent for parent in graph.nodes[name].parents if parent not in made]
        if missing:
            raise StoreError(
                f"{name} reads from {' and '.join(missing)}, which {store.path} does not hold for this pipeline: "
                f"`dflow run` with the same file and -s computes them; stop it (Ctrl-C) when {name} has started"
            )
    artifacts = {name: (store.object_path(digest), digest) for name, digest in made.items() if digest is not None}
    return [computed("comparison", ENTRY, graph, name, artifacts, samples=samples) for name in nodes]


def _capture_nodes(graph: Graph, node_id: str | None) -> list[str]:
    captures = [name for name, node in graph.nodes.items() if node.op.name == CAPTURE]
    if node_id is None and captures:
        return captures
    if node_id in captures:
        return [node_id] if node_id is not None else []
    if node_id is None:
        raise PipelineError([Finding(f"{graph.name} has no {CAPTURE} node, so there is nothing to compare")])
    hint = did_you_mean(node_id, captures) or f"{CAPTURE} nodes: {', '.join(captures) or 'none'}"
    raise PipelineError([Finding(f'"{node_id}" is not a {CAPTURE} node', advice=hint)])
