"""A draft that knows a target's own answers by heart, made through the ops as a pipeline makes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from fake_stage import FakeStage

from dsl.op import Ref
from ops.artifacts import BatchPlan, Draft, DraftCheckpoint, TargetFeatures, TargetModel, TokenShards
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.export_draft.op import ExportDraft
from ops.export_draft.run import export_draft
from ops.lib.data.files import write_json, write_jsonl
from ops.lib.data.token_shards import TokenSample, write_token_shard
from ops.lib.drafts.decoding.decode import Decoded
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash


def overfit(
    folder: Path,
    target: TargetModel,
    tokens: TokenShards,
    *,
    epochs: int = 24,
    capture: dict[str, Any],
    engine: str | None = None,
    **train: Any,
) -> Draft:
    """Train a draft on the train split, by capture, shard, train and export.

    capture, train: fields of these ops. engine: of export_draft.
    """
    inputs: dict[str, Any] = {"tokens": tokens, "target": target}
    refs = {name: Ref(name) for name in ("tokens", "target", "features", "batches")}
    stage = FakeStage(folder / "capture", inputs)
    capture_targets(CaptureTargets(tokens=refs["tokens"], target=refs["target"], splits=("train",), **capture), stage)
    inputs["features"] = stage.artifact(TargetFeatures)
    stage = FakeStage(folder / "shard", inputs)
    shard_sequence(ShardSequence(features=refs["features"], tokens_per_step=512, epochs=epochs, seed=0), stage)
    inputs["batches"] = stage.artifact(BatchPlan)
    stage = FakeStage(folder / "train", inputs)
    train_dflash(TrainDflash(**refs, **{"num_layers": 1, "optimizer": "muon", "lr": 2e-2, "seed": 0, **train}), stage)
    stage_export = FakeStage(folder / "export", {"draft": stage.artifact(DraftCheckpoint), "target": target})
    export_draft(ExportDraft(draft=Ref("train"), target=Ref("target"), engine=engine), stage_export)
    return stage_export.artifact(Draft)


def with_answers(
    folder: Path,
    info: dict[str, Any],
    prompts: Sequence[TokenSample],
    answers: Sequence[Decoded],
    splits: Sequence[str] = ("train",),
) -> TokenShards:
    """A token artifact of the prompts with these answers, all of them in every split.

    info: the content of tokens.json without its shards.
    """
    samples = []
    for prompt, answer in zip(prompts, answers, strict=True):
        input_ids = torch.cat((prompt.input_ids[: prompt.prompt_tokens], torch.tensor(answer.tokens)))
        mask = torch.arange(len(input_ids)) >= prompt.prompt_tokens
        samples.append(evolve(prompt, input_ids=input_ids, loss_mask=mask))
    total = sum(len(sample.input_ids) for sample in samples)
    folder.mkdir()
    shards = [
        {"file": f"{split}-00000.safetensors", "split": split, "samples": len(samples), "tokens": total}
        for split in splits
    ]
    for shard in shards:
        write_token_shard(folder / shard["file"], samples, info["patch_dim"])
    write_json(folder / "tokens.json", info | {"shards": shards})
    rows = [
        {
            "id": sample.id,
            "split": shard["split"],
            "category": sample.category,
            "shard": shard["file"],
            "row": row,
            "tokens": len(sample.input_ids),
            "prompt_tokens": sample.prompt_tokens,
            "loss_tokens": int(sample.loss_mask.sum()),
            "label": "",
        }
        for shard in shards
        for row, sample in enumerate(samples)
    ]
    write_jsonl(folder / "samples.jsonl", rows)
    return TokenShards(folder, "own answers")
