"""Needs of `train_dflash`: the memory of a rank, and the disk for draft and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from dsl.estimate import CHECKPOINTS, Amount, Estimate, Growth, Outlook
from dsl.sizes import shown_bytes
from ops.capture_targets.estimate import capture_memory, feature_bytes
from ops.lib.data.files import read_jsonl
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.footprint import (
    MASTER,
    Pass,
    block_bytes,
    cast_bytes,
    context_bytes,
    draft_parameters,
    head_bytes,
    joined_bytes,
    waiting_bytes,
)
from ops.lib.estimates import (
    DraftForeseen,
    Kind,
    StepsForeseen,
    TargetForeseen,
    TokensForeseen,
    first_counted,
)
from ops.lib.sequence_parallel.degree import check_degree
from ops.lib.target.sizes import ITEM_SIZES
from ops.lib.thread_table import threads_of_drafting
from ops.train_dflash.op import PROMPTS_AT_ONCE, TrainDflash
from ops.train_dflash.shape import expected_shape

LONGEST = 3072  # tokens of a sample, if its length is unknown
STEPS = 8  # of a trial

threads = threads_of_drafting


def smoke(config: TrainDflash, samples: int) -> dict[str, Any]:
    """A few steps with a checkpoint between them; measured only at the end, if the full run is measured."""
    return {
        "max_steps": min(config.max_steps or STEPS, STEPS),
        "checkpoint_every": min(config.checkpoint_every, STEPS // 2),
        "eval_every": None if config.eval_every is None else STEPS,
    }


def estimate(config: TrainDflash, outlook: Outlook) -> Estimate:
    """The rank with the largest need: one that trains, with the target if it captures for itself."""
    launch, target = outlook.launch, outlook.inputs["target"]
    made = DraftForeseen.read(outlook.artifact, outlook.identity) if outlook.artifact is not None else None
    if target is None:
        return Estimate(growth=_growth(config, outlook), foreseen=made)
    features, tokens = outlook.inputs["features"], outlook.inputs["tokens"]
    online = config.capture == "online"
    layers = len(config.target_layer_ids or ()) or config.capture_layers
    shape = expected_shape(config, target.config, features)
    of_features = tokens if online else getattr(features, "tokens", None) or tokens
    ranks = launch.world_size - config.capture_ranks
    plan: StepsForeseen | None = outlook.inputs["batches"]
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
    decoding = decoding_memory(config, shape, target, tokens, dtype) if config.measures_tau else {}
    training = training_memory(
        config, shape, ranks, launch.sp_degree, of_features, decoding, on_cpu=launch.device == "cpu"
    )
    training["embedding and head"] = 2 * shape.vocab_size * shape.hidden_size * ITEM_SIZES[config.dtype]
    if config.measures_tau:
        training["draft that decodes"] = draft_parameters(shape) * ITEM_SIZES[config.dtype]
        training["target"] = target.sizes.parameters * ITEM_SIZES[dtype]
    notes = []
    if online:
        capture = capture_memory(target, tokens, layers, config.capture_dtype, config.capture_batch_tokens)
        notes.append(_not_stored(config, target, tokens, layers, outlook.free_disk))
        if config.capture_ranks:
            need = shown_bytes(sum(capture.values()))
            notes.append(f"{ranks} ranks train; {config.capture_ranks} capture for them and need {need} each")
        training = larger(training, capture) if config.capture_ranks else {**training, **capture}
    return Estimate(
        memory=training,
        disk=_disk(config, shape),
        less_disk="lower keep_checkpoints" if config.keep_checkpoints > 1 else "",
        notes=tuple(notes),
        growth=_growth(config, outlook),
        foreseen=made
        or DraftForeseen(
            shape=shape, mask_token_id=target.mask_token_id, identity=outlook.identity, target=target.identity
        ),
    )


def training_memory(
    config: TrainDflash,
    shape: DraftConfig,
    ranks: int,
    sp_degree: int,
    tokens: TokensForeseen | None,
    decoding: dict[str, int],
    *,
    on_cpu: bool,
) -> dict[str, int]:
    """One rank's weights and what its passes keep.

    Over several ranks FSDP2 shards masters, moments and average; the weights of a step are gathered whole, in the
    compute dtype, and its gradients are kept whole until they are reduced. One process keeps a copy in that dtype, also
    between steps, if it is narrower than the masters. Of a pass, an update's scratch and decoding for tau, the largest
    counts.
    """
    parameters, optimizer = draft_parameters(shape), 2 if config.optimizer == "adamw" else 1
    longest = tokens.longest if tokens is not None else LONGEST
    most = max(config.micro_batch_tokens, longest)
    blocks = min(config.anchor_chunk, max(1, most // longest) * config.num_anchors)
    work = Pass(
        draft=shape,
        item_size=ITEM_SIZES[config.dtype],
        context=-(-most // sp_degree),
        blocks=-(-blocks // sp_degree),
        waiting=config.buffer_batches + 1,
        checkpointed=config.activation_checkpointing,
        teacher=config.needs_teacher,
        on_cpu=on_cpu,
    )
    passes = {
        "context of a micro-batch": context_bytes(work),
        "blocks of a chunk": block_bytes(work) + head_bytes(work) + (0 if on_cpu else joined_bytes(work)),
    }
    whole = parameters * MASTER if ranks > 1 else 0  # gathered in float32, if nothing is cast
    scratch = parameters * MASTER  # of the update, or of gathering and reducing, when no pass is under way
    return {
        "draft": parameters * MASTER // ranks,
        "weights to compute with": cast_bytes(work) or whole,
        "gradients": parameters * MASTER,
        "optimizer": parameters * MASTER * optimizer // ranks,
        "average": parameters * MASTER // ranks if config.ema_decay is not None else 0,
        "micro-batches that wait": waiting_bytes(work),
        **larger(larger(passes, {"scratch of an update": scratch}), decoding),
    }


def decoding_memory(
    config: TrainDflash, shape: DraftConfig, target: TargetForeseen, tokens: TokensForeseen | None, dtype: str
) -> dict[str, int]:
    """What a batch of prompts needs to measure tau, besides the weights of target and draft."""
    sizes, size, own = target.sizes, ITEM_SIZES[dtype], ITEM_SIZES[config.dtype]
    prompt = tokens.longest if tokens is not None else LONGEST
    length = prompt + config.eval_new_tokens + shape.block_size
    own_cache = shape.num_hidden_layers * 2 * shape.num_key_value_heads * shape.head_dim
    features = len(shape.target_layer_ids) * shape.hidden_size
    caches = length * (sizes.cache_per_token * size + own_cache * own) + 2 * sizes.state_per_sequence * size
    together = PROMPTS_AT_ONCE
    return {
        "caches of prompts": together * caches,
        "prefill of prompts": sizes.forward_bytes(together * prompt, size) + together * prompt * features * size,
    }


def larger(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """The one with the larger sum."""
    return one if sum(one.values()) >= sum(other.values()) else other


def _disk(config: TrainDflash, shape: DraftConfig) -> dict[str, int]:
    """Checkpoints have masters, moments and average; the last ones, the best, and the one being written, if the
    training has as many.
    """
    parameters = draft_parameters(shape) * MASTER
    states = 1 + (2 if config.optimizer == "adamw" else 1) + (config.ema_decay is not None)
    return {
        "draft": parameters,
        CHECKPOINTS: _most_checkpoints(config) * states * parameters,
    }


def _most_checkpoints(config: TrainDflash) -> int:
    most = config.keep_checkpoints + 1 + (config.select != "last")
    if config.max_steps is None:
        return most
    every = min(config.checkpoint_every, config.eval_every or config.checkpoint_every)
    return min(most, (config.max_steps - 1) // every)


def _not_stored(
    config: TrainDflash, target: TargetForeseen, tokens: TokensForeseen | None, layers: int, free: int
) -> str:
    """Size of the features that online capture does not store."""
    per_token = feature_bytes(target.sizes, layers + config.needs_teacher, config.capture_dtype)
    count = tokens.count(("train", "val")) if tokens is not None else None
    if count is None:
        return f"online: no features are stored; they would need {shown_bytes(per_token * 1e6)} per million tokens"
    size = count * per_token
    note = f"online: no features are stored; they would need {shown_bytes(size)}, and {shown_bytes(free)} are free"
    fits = "; capture_targets would compute them once for all epochs" if size <= free else ""
    return note + fits


def _growth(config: TrainDflash, outlook: Outlook) -> Growth | None:
    """A step of a few samples is not a full one, so steps are weighed by their tokens."""
    trial = outlook.trial
    plan: StepsForeseen | None = outlook.inputs["batches"]
    if trial is None or plan is None or plan.steps is None:
        return None
    steps = min(plan.steps.full, config.max_steps or plan.steps.full)
    rows = islice(read_jsonl(trial.inputs["batches"] / "steps.jsonl"), trial.config.max_steps)
    small = sum(row["tokens"] for row in rows)
    return Growth(
        series=(Amount(small, steps * plan.tokens_per_step, "tokens"),),
        tail=max(1.0, _measuring(config, outlook.inputs, steps)),
        notes=(f"about {steps:,.0f} steps",),
    )


def _measuring(config: TrainDflash, inputs: Mapping[str, Any], steps: float) -> float:
    """How many times longer all measurements of the val split take than those of the trial.

    That of the loss, which grows with the split, or of tau, which stops at `eval_prompts`: the larger of the two.
    """
    given, counted = first_counted(inputs["features"], inputs["tokens"]), first_counted(inputs["tokens"])
    if given is None:
        return 1.0
    times = 1 if config.eval_every is None else 1 + (steps - 1) // config.eval_every
    growth = given.tokens.amount("tokens", ("val",)).growth
    if config.measures_tau and counted is not None:
        small = _prompts(counted.samples.trial, config.eval_prompts)
        growth = max(growth, _prompts(counted.samples.full, config.eval_prompts) / max(small, 1))
    return times * growth


def _prompts(samples: Mapping[Kind, float], limit: int) -> float:
    return sum(min(count, limit) for (_, split), count in samples.items() if split == "val")
