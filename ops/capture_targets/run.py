"""Capture hidden states of the target, shard by shard, with the Hugging Face backend.

A shard is a run of consecutive samples of one split. Each finished shard is renamed into the work folder, so a killed
capture goes on with the next one. Inside a shard samples are batched by length; the features do not depend on it but
for rounding.

    B batch, S padded length, T tokens of a shard, F = layers * hidden size
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from dsl.errors import DataError, StopRequested
from dsl.stage import Stage
from ops.capture_targets.layers import check_layers, spread_layers
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.shards import feature_info, write_feature_shard
from ops.files import finish_file, link_or_copy, write_json
from ops.load_target.model import Target, check_images_fit, check_tokens_fit
from ops.tokenize_chat.shards import TokenReader, TokenSample


@frozen
class ShardPlan:
    """A shard to be: the samples start .. end - 1 of a split."""

    file: str
    split: str
    start: int
    end: int
    tokens: int


def capture_targets(config: CaptureTargets, stage: Stage) -> None:
    """Write the TargetFeatures artifact; see ops/artifacts.py for its layout."""
    target = Target.load(stage.inputs["target"], stage.device, getattr(torch, config.dtype))
    layer_ids = config.target_layer_ids or spread_layers(target.num_layers, config.num_layers)
    check_layers(layer_ids, target.num_layers)
    readers = {split: TokenReader(stage.inputs["tokens"], split) for split in config.splits}
    check_fits(target, readers)
    plans = [plan for split, reader in readers.items() for plan in plan_shards(split, reader, config.shard_tokens)]
    if not plans:
        raise DataError(f"no samples in the splits {', '.join(config.splits)}: nothing to capture")
    kept_states = len(layer_ids) + config.final_hidden
    bytes_per_token = kept_states * target.hidden_size * getattr(torch, config.dtype).itemsize
    check_disk(plans, bytes_per_token, stage)
    done_tokens = 0
    total_tokens = sum(plan.tokens for plan in plans)
    for plan in plans:
        path = stage.work_dir / plan.file
        if not path.exists():
            if stage.stop_requested():
                raise StopRequested(f"capture stopped before {plan.file}; finished shards are kept")
            capture_shard(path, plan, target, readers[plan.split], layer_ids, config)
        done_tokens += plan.tokens
        stage.progress(done_tokens, total_tokens)
    for plan in plans:
        link_or_copy(stage.work_dir / plan.file, stage.out_dir / plan.file)
    stage.log(
        {
            "capture/tokens": total_tokens,
            "capture/gigabytes": total_tokens * bytes_per_token / 1e9,
            "capture/shards": len(plans),
        },
        step=0,
    )
    write_features_json(config, stage, layer_ids, plans)


def capture_shard(
    path: Path,
    plan: ShardPlan,
    target: Target,
    reader: TokenReader,
    layer_ids: Sequence[int],
    config: CaptureTargets,
) -> None:
    """Write one shard; the file appears whole or not at all. In memory are its states, and the samples of one batch."""
    dtype = getattr(torch, config.dtype)
    lengths = [record["tokens"] for record in reader.records[plan.start : plan.end]]
    offsets = [0, *accumulate(lengths)]
    input_ids_T = torch.empty(offsets[-1], dtype=torch.int64)
    loss_mask_T = torch.empty(offsets[-1], dtype=torch.bool)
    features_TF = torch.empty(offsets[-1], len(layer_ids) * target.hidden_size, dtype=dtype)
    final_TM = torch.empty(offsets[-1], target.hidden_size, dtype=dtype) if config.final_hidden else None
    for batch in batches_by_length(lengths, config.batch_tokens or default_batch_tokens(target.device.type)):
        samples = [reader.sample(plan.start + row) for row in batch]
        features_BSF, final_BSM = forward_batch(target, samples, layer_ids, final_hidden=config.final_hidden)
        for place, row in enumerate(batch):
            here, length = slice(offsets[row], offsets[row + 1]), lengths[row]
            input_ids_T[here], loss_mask_T[here] = samples[place].input_ids, samples[place].loss_mask
            features_TF[here] = features_BSF[place, :length]
            if final_TM is not None and final_BSM is not None:
                final_TM[here] = final_BSM[place, :length]
    partial = path.with_suffix(".partial")
    write_feature_shard(partial, features_TF, input_ids_T, loss_mask_T, torch.tensor(offsets), final_TM)
    finish_file(partial, path)


@torch.inference_mode()
def forward_batch(
    target: Target, samples: Sequence[TokenSample], layer_ids: Sequence[int], *, final_hidden: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Features [B, S, F] and, where asked for, final hidden states [B, S, M] of one forward pass, padded, on the CPU.

    Samples with and without images go together. Pixel rows need no budget of their own: merge_size^2 of them make an
    image token, and vision attention stays within an image.
    """
    with target.capture_inputs(layer_ids) as captured:
        final_BSM = target.hidden(target.inputs(samples))
    return captured.features().cpu(), final_BSM.cpu() if final_hidden else None


def default_batch_tokens(device_type: str) -> int:
    """What a forward pass takes at its fastest: a GPU has much to fill, and a CPU little cache."""
    return 1024 if device_type == "cpu" else 8192


def plan_shards(split: str, reader: TokenReader, shard_tokens: int) -> list[ShardPlan]:
    """Cut a split into shards of at most `shard_tokens` tokens (one sample at least)."""
    lengths = [record["tokens"] for record in reader.records]
    plans: list[ShardPlan] = []
    start = tokens = 0
    for index, length in enumerate([*lengths, shard_tokens + 1]):
        if index > start and tokens + length > shard_tokens:
            plans.append(ShardPlan(f"{split}-{len(plans):05d}.safetensors", split, start, index, tokens))
            start, tokens = index, 0
        tokens += length
    return plans


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices in batches of similar length whose padded size stays within `batch_tokens` (one sample at least)."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda row: (lengths[row], row)):
        if batches and lengths[index] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def check_fits(target: Target, readers: dict[str, TokenReader]) -> None:
    """Refuse tokens that this target cannot read. Raises DataError."""
    for reader in readers.values():
        check_tokens_fit(reader.info, target.info)
        check_images_fit(reader, target.family)


def check_disk(plans: Sequence[ShardPlan], bytes_per_token: int, stage: Stage) -> None:
    """Tell the disk that is needed before anything is captured. Raises DataError where there is not enough."""
    tokens = sum(plan.tokens for plan in plans)
    missing = sum(plan.tokens for plan in plans if not (stage.work_dir / plan.file).exists())
    free = shutil.disk_usage(stage.work_dir).free
    print(
        f"dflow: {tokens:,} tokens in {len(plans)} shards, {bytes_per_token:,} bytes a token, "
        f"{tokens * bytes_per_token / 1e9:.2f} GB in all, {free / 1e9:.1f} GB free",
        flush=True,
    )
    if missing * bytes_per_token > free:
        raise DataError(
            f"capture needs {missing * bytes_per_token / 1e9:.1f} GB more, but only {free / 1e9:.1f} GB are free at "
            f"{stage.work_dir}: free some, use another store (--store), a smaller dtype, or fewer layers"
        )


def write_features_json(
    config: CaptureTargets, stage: Stage, layer_ids: Sequence[int], plans: Sequence[ShardPlan]
) -> None:
    """Write features.json, which says what the shards hold and where they come from."""
    info = feature_info(
        stage.inputs["target"], stage.inputs["tokens"], layer_ids, config.dtype, final_hidden=config.final_hidden
    )
    shards = [
        {"file": plan.file, "split": plan.split, "samples": plan.end - plan.start, "tokens": plan.tokens}
        for plan in plans
    ]
    write_json(stage.out_dir / "features.json", info | {"shards": shards})
