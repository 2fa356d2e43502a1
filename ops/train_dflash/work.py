"""What a training computes and moves, for its cost on other machines. Torch-free, for `dflow plan --gpus`."""

from __future__ import annotations

from collections.abc import Callable

from dsl.estimate import CaptureWork, TrainingWork
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.sizes import MASTER, draft_parameters, step_flops
from ops.lib.forecasts import TokensForecast
from ops.lib.target.sizes import ITEM_SIZES
from ops.shard_sequence.plan import PlannedSteps
from ops.tokenize_chat.plan import mean_length
from ops.train_dflash.op import TrainDflash


def training_work(
    config: TrainDflash,
    shape: DraftConfig,
    read: TokensForecast,
    steps: PlannedSteps,
    memory: Callable[[int], int],
    sp_degree: int,
    capture: CaptureWork | None,
) -> TrainingWork:
    """The work of a training. read: the tokens that it is trained on, or whose features it reads.

    memory: bytes of a rank, by the number of ranks. Anchors are taken to see half of their sample, and all slots to
    have a weight.
    """
    counted = read.count(("train",))
    tokens, epochs = None if counted is None else counted * steps.epochs, float(steps.epochs)
    if tokens and config.max_steps is not None:
        share = min(1.0, config.max_steps * steps.step_limit / tokens)
        tokens, epochs = int(tokens * share), epochs * share
    length, is_counted = mean_length(read, ("train",))
    return TrainingWork(
        tokens=tokens,
        epochs=epochs,
        step_tokens=steps.step_limit,
        sample_tokens=length,
        is_counted=is_counted,
        sample_flops=sample_flops(config, shape, length),
        longest_flops=sample_flops(config, shape, max(length, read.longest)),
        update_bytes=draft_parameters(shape) * (MASTER + ITEM_SIZES[config.dtype]),
        memory=memory,
        sp_degree=sp_degree,
        buffer_batches=config.buffer_batches,
        dtype=config.dtype,
        capture=capture,
    )


def sample_flops(config: TrainDflash, shape: DraftConfig, tokens: float) -> float:
    """The FLOPs of a step on a sample of so many tokens."""
    length = max(1, round(tokens))
    anchors = min(config.num_anchors, length)
    return step_flops(
        shape,
        length,
        anchors,
        anchors * length // 2,
        anchors * (shape.block_size - 1),
        with_teacher=config.needs_teacher,
    )
