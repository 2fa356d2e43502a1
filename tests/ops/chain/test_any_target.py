"""A target that is not Qwen's, through every op of the chain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from any_targets import any_checkpoint, numbered_rows
from fake_stage import FakeStage

from dsl.op import Ref
from ops.artifacts import (
    BatchPlan,
    Draft,
    DraftCheckpoint,
    ImageSamples,
    Samples,
    TargetFeatures,
    TargetModel,
    TokenShards,
)
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.evaluate.op import Evaluate
from ops.evaluate.run import evaluate
from ops.export_draft.op import ExportDraft
from ops.export_draft.run import export_draft
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images
from ops.lib.data.files import read_json
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return numbered_rows(tmp_path / "data.jsonl", 8)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss"])
def test_a_target_of_any_family_goes_through_the_whole_chain(data: Path, tmp_path: Path, kind: str) -> None:
    checkpoint = str(any_checkpoint(kind, tmp_path / "checkpoint"))

    def made(name: str, config: Any, run: Any, output: Any, **inputs: Any) -> Any:
        stage = FakeStage(tmp_path / name, inputs)
        run(config, stage)
        return stage.artifact(output)

    samples = made("ingest", Ingest(source=str(data), seed=0), ingest, Samples)
    images = made("inject", InjectImages(samples=Ref("a")), inject_images, ImageSamples, samples=samples)
    target = made("target", LoadTarget(checkpoint=checkpoint), load_target, TargetModel)
    config = TokenizeChat(samples=Ref("a"), target=Ref("b"), min_loss_tokens=8)
    tokens = made("tokenize", config, tokenize_chat, TokenShards, samples=images, target=target)
    config = CaptureTargets(tokens=Ref("a"), target=Ref("b"), target_layer_ids=(0, 2, 4))
    features = made("capture", config, capture_targets, TargetFeatures, tokens=tokens, target=target)
    config = ShardSequence(features=Ref("a"), tokens_per_step=1024, epochs=1, seed=0)
    plan = made("shard", config, shard_sequence, BatchPlan, features=features)
    config = TrainDflash(
        features=Ref("a"), batches=Ref("b"), target=Ref("c"), block_size=4, num_layers=1, num_anchors=4, seed=0
    )
    given = {"features": features, "batches": plan, "target": target, "tokens": tokens}
    trained = made("train", config, train_dflash, DraftCheckpoint, **given)
    draft = made(
        "export", ExportDraft(draft=Ref("a"), target=Ref("b")), export_draft, Draft, draft=trained, target=target
    )
    config = Evaluate(draft=Ref("a"), target=Ref("b"), tokens=Ref("c"), max_new_tokens=8, max_prompts=1, seed=0)
    made("eval", config, evaluate, Draft, draft=draft, target=target, tokens=tokens)

    assert kind == read_json(target.path / "target.json")["model_type"]
    shape = read_json(draft.path / "config.json")
    assert (64, 4, 2, 6) == tuple(
        shape[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_target_layers")
    )
    report = read_json(tmp_path / "eval" / "out" / "report.json")
    assert {"errors": 0, "ties": 0} == report["lossless"]
