"""A target that is not Qwen's, through every op of the chain."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
from any_targets import any_checkpoint, numbered_rows
from fake_stage import FakeStage
from family_checkpoints import picture
from seeing_targets import seeing_checkpoint

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
from ops.lib.data.token_shards import TokenReader
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.tokenize_chat.builtin import SPECIAL_TOKENS
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return numbered_rows(tmp_path / "data.jsonl", 8)


def written(tmp_path: Path, image: str) -> Path:
    """Chats, every second one with this image."""
    file = numbered_rows(tmp_path / "data.jsonl", 8)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows[::2]:
        row["image"] = image
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss"])
def test_a_target_of_any_family_goes_through_the_whole_chain(data: Path, tmp_path: Path, kind: str) -> None:
    go_through_the_chain(kind, any_checkpoint(kind, tmp_path / "checkpoint"), data, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "llava_onevision", "idefics3"])
def test_a_target_whose_own_processor_reads_images_goes_through_the_whole_chain(tmp_path: Path, kind: str) -> None:
    picture(40, 24).save(tmp_path / "picture.png")
    data = written(tmp_path, "picture.png")
    tokens = go_through_the_chain(kind, seeing_checkpoint(kind, tmp_path / "checkpoint"), data, tmp_path)
    reader = TokenReader(tokens)
    assert (kind, None) == (reader.info["images_of"], reader.info["pixel_limits"])
    assert 4 == sum(reader.sample(place).has_images for place in range(len(reader)))


def test_a_mask_token_that_the_chat_template_gives_is_named_with_the_first_sample(data: Path, tmp_path: Path) -> None:
    def made(name: str, config: Any, run: Any, output: Any, **inputs: Any) -> Any:
        run(config, stage := FakeStage(tmp_path / name, inputs))
        return stage.artifact(output)

    mask = SPECIAL_TOKENS.index("<|im_start|>")
    loaded = LoadTarget(checkpoint=str(any_checkpoint("llama", tmp_path / "checkpoint")), mask_token_id=mask)
    target = made("target", loaded, load_target, TargetModel)
    samples = made("ingest", Ingest(source=str(data), seed=0), ingest, Samples)
    images = made("inject", InjectImages(samples=Ref("a")), inject_images, ImageSamples, samples=samples)
    stage = FakeStage(tmp_path / "tokens", {"samples": images, "target": target})
    tokenize_chat(TokenizeChat(samples=Ref("a"), target=Ref("b"), min_loss_tokens=8), stage)
    assert [f"8 samples hold the mask token, {mask} (first: sample"] == [text.split(' "')[0] for text in stage.warnings]
    advised = re.search(r"set mask_token_id of train_dflash .*, such as (\d+), which no sample has$", stage.warnings[0])
    reader = TokenReader(stage.artifact(TokenShards))
    given = {int(token) for place in range(len(reader)) for token in reader.sample(place).input_ids}
    assert advised is not None and mask in given and int(advised[1]) not in given


def go_through_the_chain(kind: str, checkpoint: Path, data: Path, tmp_path: Path) -> TokenShards:
    """Run every op, check the draft's shape and that it decodes without loss, and return the tokens."""

    def made(name: str, config: Any, run: Any, output: Any, **inputs: Any) -> Any:
        stage = FakeStage(tmp_path / name, inputs)
        run(config, stage)
        return stage.artifact(output)

    samples = made("ingest", Ingest(source=str(data), seed=0), ingest, Samples)
    images = made("inject", InjectImages(samples=Ref("a")), inject_images, ImageSamples, samples=samples)
    target = made("target", LoadTarget(checkpoint=str(checkpoint)), load_target, TargetModel)
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
    return cast(TokenShards, tokens)
