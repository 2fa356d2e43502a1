"""What a training needs on disk, in memory and in time, and what it lacks on this machine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from dsl.estimate import CHECKPOINTS, Amount, Estimate, Growth, PlanContext, TrainingWork
from dsl.imports import child_environment, module_command
from dsl.op_table import own_algorithms
from dsl.shown import shown_bytes
from ops.capture_targets.plan import capture_work, feature_bytes, target_pass
from ops.lib.data.files import read_jsonl
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.sizes import MASTER, draft_parameters
from ops.lib.drafts.backbone.step_memory import rank_memory
from ops.lib.forecasts import (
    DraftForecast,
    Kind,
    StepsForecast,
    TargetForecast,
    TokensForecast,
    first_counted,
    length_note,
)
from ops.lib.sequence_parallel.degree import check_degree
from ops.lib.target.sizes import ITEM_SIZES
from ops.lib.thread_table import threads_of_drafting
from ops.shard_sequence.plan import PlannedSteps
from ops.train_dflash.op import ONLINE_SPLITS, PAUSE, TrainDflash
from ops.train_dflash.shape import expected_shape
from ops.train_dflash.work import training_work

STEPS = 8  # of a trial
UNITS_OF_WORKER = 3  # one that is computed and capture_worker.FINISHED that are sent

threads = threads_of_drafting


def smoke(config: TrainDflash, samples: int) -> dict[str, Any]:
    """Fields for a smoke run: a few steps with a checkpoint between them.

    It is measured only at the end, if the full run is measured. A pause is after the first step.
    """
    paused = {} if config.pause_after is None else {PAUSE: 1}
    return {
        **paused,
        "max_steps": min(config.max_steps or STEPS, STEPS),
        "checkpoint_every": min(config.checkpoint_every, STEPS // 2),
        "eval_every": None if config.eval_every is None else STEPS,
    }


def estimate(config: TrainDflash, context: PlanContext) -> Estimate:
    """Estimate the needs of a training rank, including the target if it captures for itself."""
    launch, target = context.launch, context.inputs["target"]
    made = DraftForecast.read(context.artifact, context.identity) if context.artifact is not None else None
    if target is None:
        return Estimate(growth=_growth(config, context), forecast=made)
    features, tokens = context.inputs["features"], context.inputs["tokens"]
    online = config.capture == "online"
    layers = len(config.target_layer_ids or ()) or config.capture_layers
    shape = expected_shape(config, target.config, features)
    ranks = launch.world_size
    plan: StepsForecast | None = context.inputs["batches"]
    check_degree(
        world_size=ranks,
        sp_degree=launch.sp_degree,
        sp_exchange=config.sp_exchange,
        query_heads=shape.num_attention_heads,
        kv_heads=shape.num_key_value_heads,
        shortest=launch.sp_degree,  # of samples whose length is not known
        pad_multiple=launch.sp_degree if plan is None or plan.pad_multiple is None else plan.pad_multiple,
    )
    dtype = config.capture_dtype if online else getattr(features, "dtype", config.dtype)
    memory = training_memory(config, shape, ranks)
    read = tokens or (None if features is None else features.tokens)
    longest = 0 if read is None else read.longest
    per_pass = step_memory(config, shape, launch.sp_degree, ranks, longest)
    weights = target.sizes.parameters * ITEM_SIZES[dtype]
    notes = []
    if online:
        of_target = target_pass(target.sizes.text, config.capture_dtype, longest, config.capture_batch_tokens, layers)
        notes.append(_not_stored(config, target, tokens, layers, context.free_disk))
        if note := length_note(tokens, target, ONLINE_SPLITS):
            notes.append(note)
        if launch.pool is None:
            per_pass["the target's pass"] = sum(of_target.values())
        else:
            unit = max(longest, config.micro_batch_tokens) * _state_bytes(config, target, layers)
            notes.append(
                f"pool: each of {launch.pool.workers} workers needs {shown_bytes(weights)} for the target, "
                f"{shown_bytes(sum(of_target.values()))} for a pass, and {shown_bytes(UNITS_OF_WORKER * unit)} for the "
                f"features of {UNITS_OF_WORKER} micro-batches; a rank receives {shown_bytes(unit)} for each"
            )
            if idle := config.idle_workers(launch.pool.workers, ranks // launch.sp_degree):
                notes.append(f"pool: {idle}")
    if config.measures_tau:
        memory["draft that decodes"] = draft_parameters(shape) * ITEM_SIZES[config.dtype]
    if config.measures_tau or (online and launch.pool is None):
        memory["target"] = weights
    return Estimate(
        memory=memory,
        per_pass=per_pass,
        disk=_disk(config, shape),
        less_disk="lower keep_checkpoints" if config.keep_checkpoints > 1 else "",
        notes=tuple(notes),
        growth=_growth(config, context),
        work=_work(config, shape, target, read, plan, launch.sp_degree),
        forecast=made
        or DraftForecast(
            shape=shape, mask_token_id=target.mask_token_id, identity=context.identity, target=target.identity
        ),
    )


def _work(
    config: TrainDflash,
    shape: DraftConfig,
    target: TargetForecast,
    read: TokensForecast | None,
    plan: StepsForecast | None,
    sp_degree: int,
) -> TrainingWork | None:
    """The work of the training; None where the batches or tokens come from an op that says nothing of them."""
    if read is None or not isinstance(plan, PlannedSteps):
        return None
    dtype = config.capture_dtype
    weights = target.sizes.parameters * ITEM_SIZES[dtype]
    decoded_with = weights + draft_parameters(shape) * ITEM_SIZES[config.dtype] if config.measures_tau else 0
    layers = len(shape.target_layer_ids)
    capture = None
    if config.capture == "online":
        capture = capture_work(
            target,
            read,
            ("train",),
            token_bytes=_state_bytes(config, target, layers),
            dtype=dtype,
            feature_dtype=config.feature_dtype,
            weights=weights,
            pass_tokens=config.capture_batch_tokens,
            states=layers + config.needs_teacher,
        )

    def memory(ranks: int) -> int:
        held = training_memory(config, shape, ranks)
        passing = step_memory(config, shape, sp_degree, ranks, read.longest)
        return sum(held.values()) + sum(passing.values()) + decoded_with

    return training_work(config, shape, read, plan, memory, sp_degree, capture)


def training_memory(config: TrainDflash, shape: DraftConfig, ranks: int) -> dict[str, int]:
    """The bytes that one rank holds between steps, by part, without what a pass keeps.

    Over several ranks, FSDP2 shards masters, moments and average. The weights of a step are gathered whole in the
    compute dtype, and its gradients kept whole until they are reduced. One process holds a copy in that dtype if it is
    narrower than the masters.
    """
    parameters, optimizer, size = draft_parameters(shape), _moments(config), ITEM_SIZES[config.dtype]
    return {
        "draft": parameters * MASTER // ranks,
        "weights to compute with": parameters * size if size < MASTER or ranks > 1 else 0,
        "gradients": parameters * MASTER,
        "optimizer": parameters * MASTER * optimizer // ranks,
        "average": parameters * MASTER // ranks if config.ema_decay is not None else 0,
        "embedding and head": 2 * shape.vocab_size * shape.hidden_size * size,
    }


def step_memory(config: TrainDflash, shape: DraftConfig, degree: int, ranks: int, longest: int) -> dict[str, int]:
    """The bytes that a step over the longest sample keeps on one rank, or one over as many as a micro-batch takes.

    More micro-batches are prepared meanwhile, `buffer_batches` and the one that is being read.
    """
    context = max(longest, config.micro_batch_tokens)
    parts = rank_memory(
        shape,
        context=context,
        anchors=min(config.num_anchors * max(1, context // max(longest, 1)), config.anchor_chunk * degree),
        degree=degree,
        exchange="alone" if degree == 1 else config.sp_exchange.replace("auto", "gather"),
        ranks=ranks,
        item_size=ITEM_SIZES[config.dtype],
    )
    del parts["weights"]
    prepared, read = (config.buffer_batches + 1) * parts["features"], degree * parts["features"]
    return parts | {"prepared features": prepared, "shards that are read": read}


def _moments(config: TrainDflash) -> int:
    """The number of moments that the optimizer keeps for a weight."""
    return 2 if config.optimizer == "adamw" else 1


def _disk(config: TrainDflash, shape: DraftConfig) -> dict[str, int]:
    """The bytes on disk, by part: the draft, and the checkpoints with masters, moments and average.

    Checkpoints are the last ones, the best, and the one being written, if the training has so many; those of a pause
    stay in the artifact.
    """
    parameters = draft_parameters(shape) * MASTER
    states = 1 + _moments(config) + (config.ema_decay is not None)
    kept = 0 if config.pause_after is None else 1 + (config.select != "last")
    return {
        "draft": parameters,
        **({"state of the pause": kept * states * parameters} if kept else {}),
        CHECKPOINTS: _most_checkpoints(config) * states * parameters,
    }


def _most_checkpoints(config: TrainDflash) -> int:
    most = config.keep_checkpoints + 1 + (config.select != "last")
    if config.max_steps is None:
        return most
    every = min(config.checkpoint_every, config.eval_every or config.checkpoint_every)
    return min(most, (config.max_steps - 1) // every)


def _state_bytes(config: TrainDflash, target: TargetForecast, layers: int) -> int:
    """The bytes of a token's features."""
    states = layers + config.needs_teacher
    return feature_bytes(target.sizes, states, config.capture_dtype, config.feature_dtype)


def _not_stored(
    config: TrainDflash, target: TargetForecast, tokens: TokensForecast | None, layers: int, free: int
) -> str:
    """A note on the size of the features that online capture does not store."""
    per_token = _state_bytes(config, target, layers)
    count = tokens.count(("train", "val")) if tokens is not None else None
    if count is None:
        return f"online: no features are stored; they would need {shown_bytes(per_token * 1e6)} per million tokens"
    size = count * per_token
    note = f"online: no features are stored; they would need {shown_bytes(size)}, and {shown_bytes(free)} are free"
    fits = "; capture_targets would compute them once for all epochs" if size <= free else ""
    return note + fits


def _growth(config: TrainDflash, context: PlanContext) -> Growth | None:
    """The growth from trial to full run; steps are weighted by their tokens, since a step of few samples is smaller."""
    trial = context.trial
    plan: StepsForecast | None = context.inputs["batches"]
    if trial is None or plan is None or plan.steps is None:
        return None
    steps = min(plan.steps.full, config.max_steps or plan.steps.full, config.pause_after or plan.steps.full)
    rows = islice(read_jsonl(trial.inputs["batches"] / "steps.jsonl"), trial.config.max_steps)
    small = sum(row["tokens"] for row in rows)
    return Growth(
        series=(Amount(small, steps * plan.tokens_per_step),),
        tail=max(1.0, _measuring(config, context.inputs, steps)),
        notes=(f"about {steps:,.0f} steps",),
    )


def _measuring(config: TrainDflash, inputs: Mapping[str, Any], steps: float) -> float:
    """The ratio of the time for all val measurements in the full run to that in the trial.

    Loss measurements grow with the split, tau measurements stop at `eval_prompts`; the larger ratio counts.
    """
    given, counted = first_counted(inputs["features"], inputs["tokens"]), first_counted(inputs["tokens"])
    if given is None:
        return 1.0
    times = 1 if config.eval_every is None else 1 + (steps - 1) // config.eval_every
    growth = given.tokens.amount(("val",)).growth
    if config.measures_tau and counted is not None:
        small = _prompts(counted.samples.trial, config.eval_prompts)
        growth = max(growth, _prompts(counted.samples.full, config.eval_prompts) / max(small, 1))
    return times * growth


def _prompts(samples: Mapping[Kind, float], limit: int) -> float:
    return sum(min(count, limit) for (_, split), count in samples.items() if split == "val")


TRIAL = "ops.lib.drafts.own_trial"  # not imported: it loads torch


def missing_here(config: TrainDflash) -> dict[str, str]:
    """The first mistake in trying a user's algorithm in another process, by field; empty for other algorithms."""
    folder = own_algorithms().get(config.algorithm)
    if folder is None:
        return {}
    fields = {} if config.terms is None else dict(config.terms.sizes())
    training = json.dumps({"fields": fields, "own": config.own, "loss": config.loss}, sort_keys=True)
    mistake = _mistake(folder, config.block_size, min(config.num_layers, 2), training)
    return {"algorithm": mistake} if mistake else {}


@cache
def _mistake(folder: Path, block_size: int, layers: int, training: str) -> str:
    done = subprocess.run(
        module_command(TRIAL, str(folder), str(block_size), str(layers), training),
        capture_output=True,
        text=True,
        env=child_environment(),
        check=False,
    )
    if done.returncode:
        return f"{folder}: the process that tries it ended with exit code {done.returncode}: {done.stderr[-3000:]}"
    mistake: str = json.loads(done.stdout.splitlines()[-1])
    return mistake
