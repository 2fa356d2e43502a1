"""The inputs and the evaluation of a draft, found in a run's graph by the ops' declared outputs; torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from attrs import frozen

from dsl.errors import DataError
from dsl.graph import Graph, GraphNode
from dsl.op import Artifact
from ops.artifacts import Draft, DraftCheckpoint, Report, TargetFeatures, TargetModel, TokenShards
from ops.lib.data.files import read_json
from ops.lib.data.sample_account import Loss, losses_of

Kind = TypeVar("Kind", bound=Artifact)
Made = Mapping[str, tuple[Path, str]]  # node -> folder and digest of its output, if the store has it

SPLITS = ("test", "val")  # of held-out prompts, the first unless an evaluation names another
MAX_NEW_TOKENS = 128
DTYPE = "float32"
BATCH_SIZE = 8
REGENERATE = "regenerate_answers"
MADE_OF_OTHERS = (Draft, TargetModel)  # inputs of a training that come from other data
OTHERWISE = ("benchmark", "temperature", "block_size")  # fields of evaluate that a diagnosis ignores


@frozen(kw_only=True)
class Evaluation:
    """The node that evaluated the draft in the run, and its settings; fields are None where a diagnosis does the same.

    tau: None if the store has no report. benchmark: a file's name, given in place of a split.
    """

    node: str
    tau: float | None
    benchmark: str | None
    temperature: float | None
    block_size: int | None


@frozen(kw_only=True)
class Chain:
    """The artifacts around one draft; None if there is no such node, or the store no longer has its output.

    learnt: the tokens that the draft was trained on. judged: the tokens whose prompts measure it, from `split`, or from
    `other_splits` if that is empty. Further fields are those of the `evaluation` node. regenerated_at: temperature at
    which the training answers were regenerated, None if they were not. kept_by: the regenerate_answers node that kept
    the data's answers. losses: (node, loss) of the nodes above the training, in the order of the data; None if the
    store has none of their accounts. answered: the report of the evaluation, if that decoded the prompts of `split` as
    a diagnosis does; asks_each: for every answer of a conversation, not only for its last one.
    """

    node: str
    draft: Draft
    target: TargetModel
    judged: TokenShards
    training: DraftCheckpoint | None
    features: TargetFeatures | None
    learnt: TokenShards | None
    is_online: bool
    regenerated_at: float | None
    kept_by: str | None
    losses: tuple[tuple[str, Loss], ...] | None
    evaluation: Evaluation | None
    answered: Report | None
    asks_each: bool
    split: str
    other_splits: tuple[str, ...]
    max_new_tokens: int
    dtype: str
    batch_size: int
    device: str

    @classmethod
    def of(cls, graph: Graph, made: Made, node_id: str, split: str | None = None, run: str = "RUN") -> Chain:
        """Find the artifacts around the draft of a node.

        split: use only prompts of this split; None: the evaluation's, or another if it has none. run: the graph's run.
        Raises DataError if the draft, its target or the tokens are missing.
        """
        draft = graph.nodes[node_id]
        training = next(_above(graph, draft, DraftCheckpoint), None)
        judge = _judge(graph, draft)
        is_online = training is not None and getattr(training.config, "capture", "") == "online"
        features = None if is_online else _features(graph, training)
        tokens = _source(graph, made, (features, training), TokenShards)
        learnt = _artifact(made, tokens, TokenShards)
        judged = _artifact(made, _source(graph, made, (judge,), TokenShards), TokenShards) or learnt
        target = _artifact(made, _source(graph, made, (judge, draft, training), TargetModel), TargetModel)
        own = _artifact(made, draft, Draft)
        absent = [name for name, value in ((node_id, own), ("its target", target), ("tokens", judged)) if value is None]
        if own is None or target is None or judged is None:
            raise DataError(f"{node_id}: this run lacks {' and '.join(absent)}; create them: dflow resume {run}")
        config = None if judge is None else judge.config
        answering = _answering(graph, tokens)
        judged_split = getattr(config, "split", SPLITS[0])
        is_alike = split in (None, judged_split) and not any(_otherwise(judge))
        return cls(
            node=node_id,
            draft=own,
            target=target,
            judged=judged,
            training=_artifact(made, training, DraftCheckpoint),
            features=_artifact(made, features, TargetFeatures),
            learnt=learnt,
            is_online=is_online,
            regenerated_at=next((float(node.config.temperature) for node in answering if not _keeps(node)), None),
            kept_by=next((node.id for node in answering if _keeps(node)), None),
            losses=_losses(graph, made, tokens),
            evaluation=None if judge is None else _evaluation(made, judge),
            answered=_artifact(made, judge, Report) if is_alike else None,
            asks_each=getattr(config, "prompts", "last") == "each",
            split=split or judged_split,
            other_splits=() if split else tuple(name for name in SPLITS if name != judged_split),
            max_new_tokens=getattr(config, "max_new_tokens", MAX_NEW_TOKENS),
            dtype=getattr(config, "dtype", DTYPE),
            batch_size=getattr(config, "batch_size", BATCH_SIZE),
            device=draft.launch.device if judge is None else judge.launch.device,
        )


def drafts_of(graph: Graph) -> list[str]:
    """The nodes that produce a draft."""
    return [node.id for node in graph.nodes.values() if node.op.output is Draft]


def last_drafts_of(graph: Graph) -> list[str]:
    """The nodes whose draft no later node replaces or was trained from (a warm start)."""
    drafts = set(drafts_of(graph))
    return [name for name in drafts_of(graph) if not (graph.below(name) & drafts) - {name}]


def training_of(graph: Graph, node_id: str) -> str | None:
    """The node that trained a draft; None if there is none."""
    return next((node.id for node in _above(graph, graph.nodes[node_id], DraftCheckpoint)), None)


def _above(
    graph: Graph, node: GraphNode, output: type[Artifact], apart: Collection[type[Artifact]] = ()
) -> Iterator[GraphNode]:
    """The nodes above with this output, nearest first, except those reached only through outputs in `apart`."""
    return (found for found in _ancestors(graph, node, apart) if found.op.output is output)


def _ancestors(graph: Graph, node: GraphNode, apart: Collection[type[Artifact]] = ()) -> Iterator[GraphNode]:
    """All nodes above a node, nearest first.

    apart: nodes with these outputs are left out, and so are nodes that only they read.
    """
    waiting, seen = list(node.parents), set()
    while waiting:
        parent = graph.nodes[waiting.pop(0)]
        if parent.id not in seen and parent.op.output not in apart:
            seen.add(parent.id)
            waiting += parent.parents
            yield parent


def _judge(graph: Graph, draft: GraphNode) -> GraphNode | None:
    """The evaluation of a draft that is most like a diagnosis: on a split, greedy, with whole blocks; None
    without one.
    """
    judges = [node for node in graph.nodes.values() if node.op.output is Report and draft.id in node.parents]
    return min(judges, key=lambda node: [value is not None for value in _otherwise(node)], default=None)


def _otherwise(judge: GraphNode | None) -> list[Any]:
    """The values of an evaluation's fields OTHERWISE; None where a diagnosis does the same."""
    return [getattr(judge.config, name, None) or None for name in OTHERWISE] if judge is not None else []


def _evaluation(made: Made, judge: GraphNode) -> Evaluation:
    report = _artifact(made, judge, Report)
    benchmark, temperature, block_size = _otherwise(judge)
    return Evaluation(
        node=judge.id,
        tau=None if report is None else read_json(report.path / "report.json")["tau"]["all"]["tau"],
        benchmark=None if benchmark is None else Path(benchmark).name,
        temperature=temperature,
        block_size=block_size,
    )


def _features(graph: Graph, training: GraphNode | None) -> GraphNode | None:
    """The node that captured a training's features, not that of a warm start's draft."""
    return None if training is None else next(_above(graph, training, TargetFeatures, MADE_OF_OTHERS), None)


def _answering(graph: Graph, tokens: GraphNode | None) -> list[GraphNode]:
    """The regenerate_answers nodes that the training answers passed through, the last one first."""
    above = () if tokens is None else _ancestors(graph, tokens, MADE_OF_OTHERS)
    return [node for node in above if node.op.name == REGENERATE]


def _losses(graph: Graph, made: Made, tokens: GraphNode | None) -> tuple[tuple[str, Loss], ...] | None:
    """The losses of the nodes that the training samples passed through; None if the store has no account of any."""
    passed = () if tokens is None else (tokens, *_ancestors(graph, tokens, MADE_OF_OTHERS))
    files = {node.id: made[node.id][0] / "summary.json" for node in passed if node.id in made}
    accounts = [(name, losses_of(read_json(file))) for name, file in files.items() if file.is_file()]
    return tuple((name, loss) for name, losses in reversed(accounts) for loss in losses) if accounts else None


def _keeps(answering: GraphNode) -> bool:
    return bool(answering.config.answers == "data")


def _source(graph: Graph, made: Made, nodes: Sequence[GraphNode | None], kind: type[Artifact]) -> GraphNode | None:
    """The node with an artifact of this kind that the first of these nodes reads."""
    for node in nodes:
        for parent in node.parents if node is not None else ():
            if _artifact(made, graph.nodes[parent], kind) is not None:
                return graph.nodes[parent]
    return None


def _artifact(made: Made, node: GraphNode | None, kind: type[Kind]) -> Kind | None:
    if node is None or node.op.output is not kind or node.id not in made:
        return None
    arguments: tuple[Any, ...] = made[node.id]
    return kind(*arguments)
