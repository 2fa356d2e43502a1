"""What a draft was made of and judged by, found in a run's graph: torch-free, by what the ops say they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from attrs import frozen

from dsl.errors import DataError
from dsl.graph import Graph, GraphNode
from dsl.op import Artifact
from ops.artifacts import Draft, DraftCheckpoint, Report, TargetFeatures, TargetModel, TokenShards

Kind = TypeVar("Kind", bound=Artifact)
Made = Mapping[str, tuple[Path, str]]  # node -> folder and digest of what it made, as far as the store has it

SPLIT = "test"
MAX_NEW_TOKENS = 128
DTYPE = "float32"
BATCH_SIZE = 8


@frozen(kw_only=True)
class Chain:
    """The artifacts around one draft; None where there is no such node, or the store no longer has what it made.

    learnt: the tokens that it was trained on; judged: those whose prompts it is measured on, of `split`. The last five
    fields are as `evaluate` has them.
    """

    node: str
    draft: Draft
    target: TargetModel
    judged: TokenShards
    training: DraftCheckpoint | None
    features: TargetFeatures | None
    learnt: TokenShards | None
    is_online: bool
    split: str
    max_new_tokens: int
    dtype: str
    batch_size: int
    device: str

    @classmethod
    def of(cls, graph: Graph, made: Made, node_id: str) -> Chain:
        """Raises DataError where the draft, its target or the tokens are not there."""
        draft = graph.nodes[node_id]
        training = next(_above(graph, draft, DraftCheckpoint), None)
        judge = next((node for node in graph.nodes.values() if node.op.output is Report and _reads(node, draft)), None)
        features = None if training is None else next(_above(graph, training, TargetFeatures), None)
        learnt = _one(graph, made, (features, training), TokenShards)
        judged = _one(graph, made, (judge,), TokenShards) or learnt
        target = _one(graph, made, (judge, draft, training), TargetModel)
        own = _artifact(made, draft, Draft)
        absent = [name for name, value in ((node_id, own), ("its target", target), ("tokens", judged)) if value is None]
        if own is None or target is None or judged is None:
            raise DataError(f"{node_id}: {' and '.join(absent)} cannot be had of this run; make it: dflow resume")
        config = None if judge is None else judge.config
        return cls(
            node=node_id,
            draft=own,
            target=target,
            judged=judged,
            training=_artifact(made, training, DraftCheckpoint),
            features=_artifact(made, features, TargetFeatures),
            learnt=learnt,
            is_online=training is not None and getattr(training.config, "capture", "") == "online",
            split=getattr(config, "split", SPLIT),
            max_new_tokens=getattr(config, "max_new_tokens", MAX_NEW_TOKENS),
            dtype=getattr(config, "dtype", DTYPE),
            batch_size=getattr(config, "batch_size", BATCH_SIZE),
            device=draft.launch.device if judge is None else judge.launch.device,
        )


def drafts_of(graph: Graph) -> list[str]:
    """The nodes that make a draft."""
    return [node.id for node in graph.nodes.values() if node.op.output is Draft]


def last_drafts_of(graph: Graph) -> list[str]:
    """Without those whose draft another of them makes anew."""
    drafts = drafts_of(graph)
    return [name for name in drafts if not any(name in graph.nodes[other].parents for other in drafts)]


def training_of(graph: Graph, node_id: str) -> str | None:
    """The node that trained a draft."""
    return next((node.id for node in _above(graph, graph.nodes[node_id], DraftCheckpoint)), None)


def _above(graph: Graph, node: GraphNode, output: type[Artifact]) -> Iterator[GraphNode]:
    """The nodes above with this output, the nearest first."""
    waiting, seen = list(node.parents), set()
    while waiting:
        parent = graph.nodes[waiting.pop(0)]
        if parent.id not in seen:
            seen.add(parent.id)
            waiting += parent.parents
            if parent.op.output is output:
                yield parent


def _reads(node: GraphNode, other: GraphNode) -> bool:
    return other.id in node.parents


def _one(graph: Graph, made: Made, nodes: Sequence[GraphNode | None], kind: type[Kind]) -> Kind | None:
    """What the first of these nodes that reads an artifact of this kind reads of it."""
    for node in nodes:
        for parent in node.parents if node is not None else ():
            found = _artifact(made, graph.nodes[parent], kind)
            if found is not None:
                return found
    return None


def _artifact(made: Made, node: GraphNode | None, kind: type[Kind]) -> Kind | None:
    if node is None or node.op.output is not kind or node.id not in made:
        return None
    arguments: tuple[Any, ...] = made[node.id]
    return kind(*arguments)
