"""What a user brings: a JSONL file with image paths and a checkpoint directory, through every op of the chain."""

from __future__ import annotations

import json

import pytest
from fake_stage import FakeStage
from PIL import Image

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
from ops.lib.data.files import read_json, read_jsonl
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash

COLOURS = ("red", "green", "blue", "white")
SIZES = ((16, 16), (40, 24), (8, 64))


@pytest.fixture
def data(tmp_path):
    """24 pictures of three shapes with two turns each, 8 texts, and 2 samples that have to be dropped."""
    (tmp_path / "img").mkdir()
    rows = []
    for index in range(24):
        colour, size = COLOURS[index % 4], SIZES[index % 3]
        Image.new("RGB", size, colour).save(tmp_path / "img" / f"{index}.png")
        turns = [
            {"role": "user", "text": "What colour is this?"},
            {"role": "assistant", "text": f"It is {colour}, {colour} all over, and nothing else can be seen on it."},
            {"role": "user", "text": "And how large?"},
            {"role": "assistant", "text": f"It measures {size[0]} by {size[1]} pixels."},
        ]
        rows.append({"id": f"picture-{index}", "image": f"img/{index}.png", "conversations": turns})
    for index in range(8):
        turns = [
            {"role": "user", "text": f"Say {index}."},
            {"role": "assistant", "text": f"The number is {index}. " * 5},
        ]
        rows.append({"id": f"text-{index}", "conversations": turns, "split": "test" if index < 2 else "train"})
    rows.append({"id": "no-answer", "conversations": [{"role": "user", "text": "Hello?"}]})
    rows.append({"id": "no-image", "image": "img/none.png", "conversations": rows[0]["conversations"]})
    rows[0]["split"], rows[1]["split"], rows[2]["split"] = "test", "val", "train"
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "data.jsonl"


def test_own_images_and_an_own_checkpoint_go_through_the_whole_chain(data, target, tmp_path):
    checkpoint = str(target.path / "model")

    def stage_of(name, config, run, output, **inputs):
        stage = FakeStage(tmp_path / name, inputs)
        run(config, stage)
        return stage.artifact(output)

    samples = stage_of("ingest", Ingest(source=str(data), seed=0), ingest, Samples)
    images = stage_of("inject", InjectImages(samples=Ref("a")), inject_images, ImageSamples, samples=samples)
    config = TokenizeChat(samples=Ref("a"), processor=checkpoint, min_loss_tokens=8)
    tokens = stage_of("tokenize", config, tokenize_chat, TokenShards, samples=images)
    own = stage_of("target", LoadTarget(checkpoint=checkpoint), load_target, TargetModel)
    config = CaptureTargets(tokens=Ref("a"), target=Ref("b"), target_layer_ids=(0, 3, 6))
    features = stage_of("capture", config, capture_targets, TargetFeatures, tokens=tokens, target=own)
    config = ShardSequence(features=Ref("a"), tokens_per_step=1024, epochs=1, seed=0)
    plan = stage_of("shard", config, shard_sequence, BatchPlan, features=features)
    config = TrainDflash(
        features=Ref("a"), batches=Ref("b"), target=Ref("c"), block_size=4, num_layers=1, num_anchors=4, seed=0
    )
    trained = stage_of(
        "train", config, train_dflash, DraftCheckpoint, features=features, batches=plan, target=own, tokens=tokens
    )
    draft = stage_of(
        "export", ExportDraft(draft=Ref("a"), target=Ref("b")), export_draft, Draft, draft=trained, target=own
    )
    config = Evaluate(draft=Ref("a"), target=Ref("b"), tokens=Ref("c"), max_new_tokens=8, max_prompts=3, seed=0)
    stage_of("eval", config, evaluate, Draft, draft=draft, target=own, tokens=tokens)

    summary = read_json(samples.path / "summary.json")
    assert {"in": 34, "kept": 32} == {name: summary[name] for name in ("in", "kept")}
    assert 2 == sum(summary["dropped"].values())
    records = {record["id"]: record for record in read_jsonl(tokens.path / "samples.jsonl")}
    assert 32 == len(records)
    assert {"test", "val", "train"} == {records[f"picture-{index}"]["split"] for index in range(3)}
    assert (0, 3, 6) == tuple(read_json(draft.path / "config.json")["dflash_config"]["target_layer_ids"])
    report = read_json(tmp_path / "eval" / "out" / "report.json")
    assert {"errors": 0, "ties": 0} == report["lossless"]
    assert {"all", "image", "text"} == set(report["tau"])
