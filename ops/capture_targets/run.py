"""Capture hidden states of the target, shard by shard, with the backend of the config.

A shard is a run of consecutive samples of one split. A thread writes each finished one while the next is captured, and
renames it into the work folder, so a killed capture continues with the next one. Inside a shard samples are batched by
length, which changes features only by rounding. The shards are divided among the ranks, and rank 0 writes the artifact
when all are complete; or workers share them, see ops/lib/data/shared_shards.py. A shard's bytes do not depend on who
made it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen

from dsl.errors import DataError, StopRequested
from dsl.imports import named_function
from dsl.shown import shown_bytes
from dsl.stage import Stage
from ops.capture_targets.backend import Backend, Halving, HuggingFaceBackend
from ops.capture_targets.conflicts import backend_note, conflicts
from ops.capture_targets.layers import layers_of
from ops.capture_targets.op import BACKEND, BACKEND_INFO, REQUIRE, CaptureTargets, default_batch_tokens
from ops.capture_targets.writing import Shard
from ops.lib.data.background_writer import BackgroundWriter
from ops.lib.data.batching import batches_by_length
from ops.lib.data.files import link_or_copy, write_json
from ops.lib.data.shared_shards import POLL_S, SharedShards, waited
from ops.lib.data.token_shards import TokenReader
from ops.lib.forecasts import TargetStated, TokensForecast, refuse_conflicts
from ops.lib.target.feature_shards import feature_info, stored_errors
from ops.lib.target.float8_errors import MeanErrors
from ops.lib.target.model import check_samples_fit, length_warnings, read_config, target_info
from ops.lib.target.sizes import state_bytes

PARTS_THAT_FILL = 16  # a GPU is busy with this fraction of the default batch_tokens: 512 tokens


@frozen
class ShardPlan:
    """A planned shard: the samples start .. end - 1 of a split."""

    file: str
    split: str
    start: int
    end: int
    tokens: int


def capture_targets(config: CaptureTargets, stage: Stage) -> None:
    """Write the TargetFeatures artifact; see ops/artifacts.py for its layout."""
    target, tokens = stage.inputs["target"], stage.inputs["tokens"]
    stated = TargetStated.read(target.path, target.digest)
    refuse_conflicts(conflicts(config, {"target": stated, "tokens": TokensForecast.read(tokens.path, tokens.digest)}))
    if config.backend == "huggingface" and (reason := stated.unbatched_reason):
        config = evolve(config, batch_tokens=1)
        if stage.rank == stage.worker == 0:
            stage.info(reason)
    if (note := backend_note(config, read_config(target.path / "model"))) and stage.rank == stage.worker == 0:
        stage.warn(note)
    info = target_info(target)
    layer_ids = layers_of(config, info["num_layers"])
    readers: dict[str, TokenReader] = {split: TokenReader(tokens, split) for split in config.splits}
    check_samples_fit(readers.values(), target)
    for warning in length_warnings(readers.values(), target) if stage.rank == stage.worker == 0 else ():
        stage.warn(warning)
    plans = [plan for split, reader in readers.items() for plan in plan_shards(split, reader, config.shard_tokens)]
    bytes_per_state = state_bytes(info["hidden_size"], config.dtype, config.feature_dtype)
    bytes_per_token = (len(layer_ids) + config.final_hidden) * bytes_per_state
    if stage.worker == 0:
        check_disk(plans, bytes_per_token, stage)
    shared = SharedShards(stage) if stage.workers > 1 else None
    work = (
        rank_shards(plans, config, stage) if shared is None else shared.claimed(lambda: plans, partial(file_of, stage))
    )
    first = next(waited(work, stage.stop_requested), None)
    if first is not None:
        with closing(open_backend(config, stage, readers)) as backend:
            capture_shards(chain([first], work), plans, backend, readers, layer_ids, config, stage)
    write = partial(write_artifact, config, stage, layer_ids, plans, bytes_per_token)
    if shared is not None:
        shared.write_artifact(write)
    elif stage.rank == 0:
        wait_for_shards(plans, stage)
        write()


def file_of(stage: Stage, plan: ShardPlan) -> Path:
    """The shard's file in the work folder; it exists once the shard is complete."""
    return stage.work_dir / plan.file


def rank_shards(plans: Sequence[ShardPlan], config: CaptureTargets, stage: Stage) -> Iterator[ShardPlan]:
    """The missing shards that this rank's group has to make."""
    group, groups = stage.rank // config.tp_degree, stage.world_size // config.tp_degree
    return iter([plan for plan in plans[group::groups] if not file_of(stage, plan).exists()])


def open_backend(config: CaptureTargets, stage: Stage, readers: Mapping[str, TokenReader]) -> Backend:
    """The backend of the config with its target loaded; SGLang's module is imported by name if it is used."""
    if config.backend == "sglang":
        require: Callable[[str], None] = named_function(REQUIRE)
        require('backend = "sglang" of capture_targets')
        start: Callable[[CaptureTargets, Stage, Mapping[str, TokenReader]], Backend] = named_function(BACKEND).start
        return start(config, stage, readers)
    return HuggingFaceBackend.load(config, stage.inputs["target"], stage.device)


def capture_shards(
    work: Iterable[ShardPlan | None],
    plans: Sequence[ShardPlan],
    backend: Backend,
    readers: Mapping[str, TokenReader],
    layer_ids: Sequence[int],
    config: CaptureTargets,
    stage: Stage,
) -> None:
    """Capture the shards of this rank or worker; the first rank of a group also writes them.

    work: yields None while other workers still make the missing shards. Raises StopRequested.
    """
    halving = Halving(backend, stage.info if stage.worker == 0 else print, shares_model=config.tp_degree > 1)
    budget = config.batch_tokens or default_batch_tokens(stage.device)
    unpadded = stage.device == "cuda" and config.backend == "huggingface"
    filled = budget // PARTS_THAT_FILL if unpadded else budget
    writes = stage.rank % config.tp_degree == 0
    show_progress(plans, stage)
    with BackgroundWriter("shards") as writer:
        for plan in work:
            if backend.any_rank(stage.stop_requested()):
                before = f" before {plan.file}" if plan is not None else ""
                raise StopRequested(f"capture stopped{before}; finished shards are kept")
            if plan is None:
                writer.wait()  # this worker's last shard may be the missing one
                show_progress(plans, stage)
                time.sleep(POLL_S)
                continue
            reader, dtype = readers[plan.split], getattr(torch, config.dtype)
            lengths = [record["tokens"] for record in reader.records[plan.start : plan.end]]
            shard = Shard(lengths, dtype, layer_ids, float8=config.feature_dtype == "float8")
            capture_shard(shard if writes else None, plan, halving, reader, layer_ids, config, budget, filled)
            if writes:
                path = file_of(stage, plan)
                writer.start(str(path), shard.write, path, stage.worker)
            show_progress(plans, stage)


def capture_shard(
    shard: Shard | None,
    plan: ShardPlan,
    backend: Backend | Halving,
    reader: TokenReader,
    layer_ids: Sequence[int],
    config: CaptureTargets,
    batch_tokens: int,
    filled: int | None = None,
) -> None:
    """Fill one shard with states; see `batches_by_length` for batch_tokens and filled.

    Memory holds the shard's states and the samples of one batch. Without a shard the passes are only run for the other
    ranks' sake, and their states dropped.
    """
    lengths = [record["tokens"] for record in reader.records[plan.start : plan.end]]
    for batch in batches_by_length(lengths, batch_tokens, filled):
        samples = [reader.sample(plan.start + row) for row in batch]
        captured = backend.forward(samples, layer_ids, final_hidden=config.final_hidden)
        if shard is not None:
            for row, sample, states in zip(batch, samples, captured, strict=True):
                shard.put(row, sample, states)


def show_progress(plans: Sequence[ShardPlan], stage: Stage) -> int:
    """Report the number of tokens in all finished shards, of any rank; returns the number of missing shards."""
    if stage.rank != 0:
        return 0
    found = {file.name for file in stage.work_dir.iterdir()}
    done = [plan.tokens for plan in plans if plan.file in found]
    stage.progress(sum(done), sum(plan.tokens for plan in plans))
    return len(plans) - len(done)


def wait_for_shards(plans: Sequence[ShardPlan], stage: Stage) -> None:
    """Waits until the other ranks' shards are complete; if one of those ranks fails, this one is ended too.

    This needs no process group; SGLang could not share one. Raises StopRequested.
    """
    while show_progress(plans, stage):
        if stage.stop_requested():
            raise StopRequested("capture stopped while other ranks had shards to make; finished shards are kept")
        time.sleep(POLL_S)


def plan_shards(split: str, reader: TokenReader, shard_tokens: int) -> list[ShardPlan]:
    """A split cut into shards of at most `shard_tokens` tokens, or a single sample."""
    lengths = [record["tokens"] for record in reader.records]
    plans: list[ShardPlan] = []
    start = tokens = 0
    for index, length in enumerate([*lengths, shard_tokens + 1]):
        if index > start and tokens + length > shard_tokens:
            plans.append(ShardPlan(f"{split}-{len(plans):05d}.safetensors", split, start, index, tokens))
            start, tokens = index, 0
        tokens += length
    return plans


def check_disk(plans: Sequence[ShardPlan], bytes_per_token: int, stage: Stage) -> None:
    """Report the required disk space before capturing. Raises DataError if there is not enough."""
    tokens = sum(plan.tokens for plan in plans)
    missing = sum(plan.tokens for plan in plans if not (stage.work_dir / plan.file).exists())
    free = shutil.disk_usage(stage.work_dir).free
    stage.info(
        f"{tokens:,} tokens in {len(plans)} shards, {bytes_per_token:,} bytes a token, "
        f"together {shown_bytes(tokens * bytes_per_token)}; {shown_bytes(free)} are free"
    )
    if missing * bytes_per_token > free:
        raise DataError(
            f"capture needs {missing * bytes_per_token / 1e9:.1f} GB more, but only {free / 1e9:.1f} GB are free at "
            f"{stage.work_dir}: free some, use another store (--store), fewer layers, or a smaller dtype or "
            "feature_dtype"
        )


def write_artifact(
    config: CaptureTargets, stage: Stage, layer_ids: Sequence[int], plans: Sequence[ShardPlan], bytes_per_token: int
) -> None:
    """Link the finished shards into the artifact, and write features.json, which describes them and their origin."""
    for plan in plans:
        link_or_copy(file_of(stage, plan), stage.out_dir / plan.file)
    total_tokens = sum(plan.tokens for plan in plans)
    shards = [shard_entry(plan, stage.out_dir, config.feature_dtype) for plan in plans]
    rounding = MeanErrors.of(layer_ids, shards)
    if warning := rounding.warning("feature_dtype of capture_targets"):
        stage.warn(warning)
    stage.log(
        {
            "capture/tokens": total_tokens,
            "capture/gigabytes": total_tokens * bytes_per_token / 1e9,
            "capture/shards": len(plans),
            **rounding.metrics("capture"),
        },
        step=0,
    )
    backend = None
    if config.backend == "sglang":
        backend_info: Callable[[Mapping[str, Any] | None], dict[str, Any]] = named_function(BACKEND_INFO)
        backend = backend_info(config.server_args)
    info = feature_info(
        stage.inputs["target"],
        stage.inputs["tokens"],
        layer_ids,
        config.dtype,
        final_hidden=config.final_hidden,
        feature_dtype=config.feature_dtype,
        backend=backend,
    )
    write_json(stage.out_dir / "features.json", info | {"shards": shards})


def shard_entry(plan: ShardPlan, folder: Path, feature_dtype: str | None) -> dict[str, Any]:
    """A finished shard's entry in features.json."""
    entry = {"file": plan.file, "split": plan.split, "samples": plan.end - plan.start, "tokens": plan.tokens}
    return entry | ({"float8_errors": stored_errors(folder / plan.file)} if feature_dtype == "float8" else {})
