"""The cost of every training of a pipeline, by the work that its ops declare and the rates that are known."""

from __future__ import annotations

from collections.abc import Mapping

from dsl.errors import DflowError
from dsl.estimate import CaptureWork, Estimate, TrainingWork
from dsl.graph import Graph
from executor.cost.constants import Machines
from executor.cost.model import Cost, Model
from executor.cost.rates import Measured, rates


def costs(
    graph: Graph, needs: Mapping[str, Estimate], machines: Machines, gpus: int, found: Measured
) -> dict[str, Cost]:
    """The cost of each training node. Raises DflowError where there is none, or not enough is known of it."""
    trainings = {node_id: need.work for node_id, need in needs.items() if isinstance(need.work, TrainingWork)}
    if not trainings:
        raise DflowError(
            "--gpus: no node of this pipeline trains a draft, or the sizes of its target or batches are not known"
        )
    return {
        node_id: _model(graph, node_id, work, needs, machines, found).cost(gpus) for node_id, work in trainings.items()
    }


def _model(
    graph: Graph,
    node_id: str,
    training: TrainingWork,
    needs: Mapping[str, Estimate],
    machines: Machines,
    found: Measured,
) -> Model:
    above = [needs[parent].work for parent in graph.nodes[node_id].parents if parent in needs]
    stored = next((work for work in above if isinstance(work, CaptureWork)), None)
    capture = training.capture or stored
    if capture is None:
        raise DflowError(f"--gpus: {node_id}: nothing is known of the capture of its features")
    if not capture.tokens or not training.tokens:
        raise DflowError(
            f"--gpus: {node_id}: the number of tokens is not known: set expected_tokens of tokenize_chat, or run that "
            "node first"
        )
    return Model(
        training=training,
        capture=capture,
        captured=capture.tokens,
        tokens=training.tokens,
        machines=machines,
        rates=rates(training, capture, machines.gpu, found),
    )
