"""Tokens/s of a GPU that captures and of one that trains: as this store's runs measured, else by the constants.

A run counts for a kind of GPU if its record names that kind, or names none for processes on a CPU. What it reached is
taken as operations a second, so that it holds for other sizes of draft, target and samples too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from attrs import frozen

from dsl.errors import DflowError
from dsl.estimate import CaptureWork, TrainingWork
from dsl.launch import Launch
from executor.cost.constants import CAPTURE_DENSE, CAPTURE_SPARSE, CPU, TRAINING, Constant, Gpu, gpu_named
from executor.cost.model import Rates
from executor.planning.preflight import graph_estimates
from executor.records.events import read_events
from executor.records.run_record import NodeState, Record, newest_records
from executor.smoke.full_run import reports, usual_pace
from executor.store.artifact_store import SMOKE, Store

RECORDS_READ = 10


@frozen(kw_only=True)
class Reached:
    """FLOP/s that one GPU, or one process on a CPU, reached; and the run that measured it."""

    flops: float
    run: str


@frozen(kw_only=True)
class Measured:
    """What runs of a pipeline reached on one kind of GPU, None where none did."""

    capture: Reached | None = None
    train: Reached | None = None


def measured(store: Store, pipeline: str, gpu: Gpu) -> Measured:
    """The newest measurements of capture and training in a store and its smoke store."""
    stores = [Store.open(path, write=False) for path in (store.path, store.path / SMOKE) if path.is_dir()]
    found: dict[str, Reached] = {}
    for each in stores:
        for record in islice(newest_records(each.records, pipeline), RECORDS_READ):
            for side, reached in _reached(each, record, gpu):
                found.setdefault(side, reached)
            if len(found) == 2:
                break
    return Measured(capture=found.get("capture"), train=found.get("train"))


def _reached(store: Store, record: Record, gpu: Gpu) -> Iterator[tuple[str, Reached]]:
    """What the nodes that a run computed on this kind of GPU reached, by side."""
    computed = {
        node_id: state
        for node_id, state in record.state.nodes.items()
        if state.state == "done" and state.cache != "hit" and _is_on(gpu, state)
    }
    if not computed:
        return
    digests = {node_id: state.digest for node_id, state in record.state.nodes.items() if state.digest is not None}
    made = {node_id: path for node_id, digest in digests.items() if (path := store.object_path(digest)).is_dir()}
    try:
        graph = record.graph()
        needs = graph_estimates(graph, made, 0).needs
    except DflowError:  # a record that does not fit today's ops, or whose files are gone, measures nothing
        return
    for node_id, state in computed.items():
        work = needs[node_id].work if node_id in needs else None
        launch = graph.nodes[node_id].launch
        found: dict[str, float] = {}
        if isinstance(work, CaptureWork):
            pace = usual_pace(reports(read_events(record.events_path), node_id, state.attempt))
            found = {"capture": work.token_flops / pace / launch.processes if pace else 0.0}
        elif isinstance(work, TrainingWork):
            found = training_flops(state.metrics, work, launch)
        yield from ((side, Reached(flops=flops, run=record.run)) for side, flops in found.items() if flops > 0)


def _is_on(gpu: Gpu, state: NodeState) -> bool:
    if gpu is CPU:
        return not state.gpu and state.gpu_memory is None  # records of earlier versions do not name a GPU
    return gpu_named(state.gpu) is gpu


def training_flops(metrics: Mapping[str, float], work: TrainingWork, launch: Launch) -> dict[str, float]:
    """FLOP/s of a rank while it does not wait, and of a pool's worker while it computes, by side; 0 if not reported.

    Where ranks capture for themselves, neither is known by itself.
    """
    if work.capture is not None and launch.pool is None:
        return {}
    computing = max(1e-9, 1 - metrics.get("train/wait_share", 0.0))
    tokens = metrics.get("train/tokens_per_second", 0.0) / computing / launch.world_size
    found = {"train": tokens * work.sample_flops / work.sample_tokens}
    busy = metrics.get("stream/workers", 0.0) * metrics.get("capture/busy_share", 0.0)
    if work.capture is not None and busy:
        found["capture"] = metrics.get("capture/tokens_per_second", 0.0) / busy * work.capture.token_flops
    return found


def rates(training: TrainingWork, capture: CaptureWork, gpu: Gpu, found: Measured) -> Rates:
    """The rates of the work on a kind of GPU. Raises DflowError for a CPU on which no run measured them."""
    share = CAPTURE_SPARSE if capture.is_sparse else CAPTURE_DENSE
    reading = 0.0 if gpu.bandwidth is None else capture.weights / capture.pass_tokens / gpu.bandwidth
    capture_rate, capture_source = _rate("capture", found.capture, gpu, share, capture.token_flops, reading)
    flops = training.sample_flops / training.sample_tokens
    train_rate, train_source = _rate("training", found.train, gpu, TRAINING, flops)
    return Rates(capture=capture_rate, train=train_rate, capture_source=capture_source, train_source=train_source)


def _rate(
    side: str, reached: Reached | None, gpu: Gpu, share: Constant, flops: float, seconds: float = 0.0
) -> tuple[float, str]:
    """Tokens/s of a GPU and their source. flops: of a token. seconds: the least that a token takes by the constants."""
    if reached is not None:
        return reached.flops / flops, f"measured by run {reached.run}"
    if gpu.flops is None:
        raise DflowError(
            f"no run of this pipeline in this store has measured {side} on a CPU, and there are no constants for one: "
            "run it first, or a trial of it (dflow run FILE --smoke 16)"
        )
    source = f"{share.value:.0%} of {gpu.flops / 1e12:,.0f} TFLOP/s, {share.source}"
    return 1 / max(flops / (gpu.flops * share.value), seconds), source
