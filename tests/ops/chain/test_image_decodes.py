"""How often the chain decodes one photograph, and where it stores it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import sklearn.datasets
from fake_stage import FakeStage
from PIL import ImageFile
from safetensors import safe_open

from dsl.op import Ref
from ops.artifacts import ImageSamples, Samples, TargetFeatures, TokenShards
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.run import regenerate_answers
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

PHOTOGRAPH = Path(sklearn.datasets.__file__).parent / "images" / "china.jpg"


@pytest.fixture
def decodes(monkeypatch):
    """How often Pillow decoded a file so far, under None."""
    counts: Counter[None] = Counter()
    load = ImageFile.ImageFile.load

    def counted(image):
        counts[None] += bool(image.tile)  # empty once an image is decoded
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    return counts


def test_a_photograph_is_decoded_at_most_twice_and_its_pixels_are_stored_once(target, tmp_path, decodes):
    turns = [
        {"role": "user", "text": "What is this?"},
        {"role": "assistant", "text": "A pavilion with a curved roof, seen through the leaves of several trees."},
    ]
    row = {"id": "photograph", "split": "train", "image": str(PHOTOGRAPH), "conversations": turns}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    found = {}

    def stage_of(name, config, run, output, **inputs):
        before = decodes[None]
        stage = FakeStage(tmp_path / name, inputs)
        run(config, stage)
        found[name] = decodes[None] - before
        return stage.artifact(output)

    a, processor = Ref("a"), str(target.path / "model")
    config = Ingest(source=str(tmp_path / "data.jsonl"), allow_outside=True, seed=0)
    samples = stage_of("ingest", config, ingest, Samples)
    images = stage_of("inject", InjectImages(samples=a), inject_images, ImageSamples, samples=samples)
    config = TokenizeChat(samples=a, processor=processor, min_loss_tokens=4)
    tokens = stage_of("tokenize", config, tokenize_chat, TokenShards, samples=images)
    config = CaptureTargets(tokens=a, target=Ref("b"), target_layer_ids=(0, 3))
    stage_of("capture", config, capture_targets, TargetFeatures, tokens=tokens, target=target)
    assert {"ingest": 0, "inject": 1, "tokenize": 1, "capture": 0} == found

    config = RegenerateAnswers(
        samples=a,
        target=Ref("b"),
        temperature=1.0,
        max_new_tokens=8,
        finish_reasons=("stop", "length"),
        min_answer_tokens=1,
        seed=0,
    )
    stage_of("regenerate", config, regenerate_answers, ImageSamples, samples=images, target=target)
    assert 1 == found["regenerate"]

    packs = [tmp_path / name / "out" / "images-00000.bin" for name in ("ingest", "inject", "regenerate")]
    assert PHOTOGRAPH.read_bytes() == packs[0].read_bytes()
    assert 1 == len({pack.stat().st_ino for pack in packs})
    shards = [shard for name in found for shard in (tmp_path / name).glob("**/*.safetensors")]
    holding = []
    for shard in shards:
        with safe_open(shard, framework="pt") as tensors:
            holding += [shard] * ("pixel_values" in tensors.keys())  # noqa: SIM118  a file, not a mapping
    assert [tmp_path / "tokenize" / "out" / "train-00000.safetensors"] == holding
