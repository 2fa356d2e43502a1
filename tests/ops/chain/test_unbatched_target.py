"""A target whose results padding changes is run one text at a time, by what load_target measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from any_targets import any_checkpoint
from fake_stage import FakeStage

from dsl.op import Ref
from ops.artifacts import ImageSamples, Samples, TargetFeatures, TargetModel, TokenShards
from ops.capture_targets.backend import forward_batch
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images
from ops.lib.data.token_shards import TokenReader
from ops.lib.forecasts import TargetStated
from ops.lib.target.feature_shards import FeatureReader
from ops.lib.target.model import Target
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

LAYERS = (0, 2, 4)


def rows(file: Path) -> Path:
    """Conversations of different lengths, so that a batch of them is padded."""
    lines = [
        {
            "id": f"text-{index}",
            "split": "train",
            "messages": [
                {"role": "user", "content": "Count the lines. " * (index + 1)},
                {"role": "assistant", "content": "There are three of them. " * (2 * index + 2)},
            ],
        }
        for index in range(4)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def made(folder: Path, config: Any, run: Any, output: Any, **inputs: Any) -> Any:
    stage = FakeStage(folder, inputs)
    run(config, stage)
    return stage.artifact(output)


def test_features_are_those_of_single_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"head_dim": 16, "lru_width": 64, "attention_window_size": 64}
    checkpoint = any_checkpoint("recurrent_gemma", tmp_path / "checkpoint", **sizes)
    target = made(tmp_path / "target", LoadTarget(checkpoint=str(checkpoint)), load_target, TargetModel)
    samples = made(tmp_path / "ingest", Ingest(source=str(rows(tmp_path / "a.jsonl")), seed=0), ingest, Samples)
    images = made(tmp_path / "images", InjectImages(samples=Ref("a")), inject_images, ImageSamples, samples=samples)
    chat = TokenizeChat(samples=Ref("a"), target=Ref("b"), min_loss_tokens=8)
    tokens = made(tmp_path / "tokens", chat, tokenize_chat, TokenShards, samples=images, target=target)
    config = CaptureTargets(
        tokens=Ref("a"), target=Ref("b"), target_layer_ids=LAYERS, splits=("train",), dtype="float32"
    )
    reason = TargetStated.read(target.path, target.digest).unbatched_reason
    assert "padded batches give what single texts give" in reason

    def distances(name: str) -> list[float]:
        """By how much the features of each text differ from those of the text alone."""
        captured = made(tmp_path / name, config, capture_targets, TargetFeatures, tokens=tokens, target=target)
        found, reader, model = FeatureReader(captured, "train"), TokenReader(tokens, "train"), Target.load(target)
        alone = [forward_batch(model, [reader.sample(place)], LAYERS)[0][0] for place in range(len(reader))]
        kept = [found.features(place, 0, found.lengths[place]) for place in range(len(reader))]
        return [float((one - other).abs().max()) for one, other in zip(kept, alone, strict=True)]

    capsys.readouterr()
    assert [0.0] * 4 == distances("capture")
    assert f"info: {reason}" in capsys.readouterr().out
