"""The target on the device (`--device`): capture, training that captures, and decoding in batches, against a CPU."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from batch_cases import draft_for_family, family_case
from device_cases import tolerance
from fake_stage import FakeStage

from dsl.op import Ref
from ops.artifacts import BatchPlan, TargetFeatures
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.lib.drafts.decoding.decode import decode_plain, decode_speculative
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_plain_batch, decode_speculative_batch
from ops.lib.target.feature_shards import FeatureReader
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash

NEW = 10


@pytest.fixture(scope="module")
def plan(tokens, tmp_path_factory):
    stage = FakeStage(tmp_path_factory.mktemp("plan"), {"tokens": tokens})
    shard_sequence(ShardSequence(tokens=Ref("tokens"), tokens_per_step=640, epochs=1, seed=0), stage)
    return stage.artifact(BatchPlan)


def test_features_captured_on_the_device_are_those_of_a_cpu(device, tokens, target, features, tmp_path):
    stage = FakeStage(tmp_path, {"tokens": tokens, "target": target}, device=device.type)
    capture_targets(CaptureTargets(tokens=Ref("tokens"), target=Ref("target"), batch_tokens=400), stage)
    expected, found = (FeatureReader(each, "train") for each in (features, stage.artifact(TargetFeatures)))
    assert expected.lengths == found.lengths
    for index, length in enumerate(expected.lengths):
        pair = [reader.features(index, 0, length) for reader in (found, expected)]
        torch.testing.assert_close(*pair, rtol=0, atol=tolerance(device, 1e-4, 1e-3))


@pytest.mark.filterwarnings("default")  # the compiler of a GPU warns of its own affairs
def test_a_training_that_captures_on_the_device_has_the_losses_of_stored_features(
    device, tokens, target, features, plan, tmp_path
):
    shape = {"block_size": 8, "num_layers": 1, "num_anchors": 8, "seed": 0, "max_steps": 3, "log_every": 1, "lr": 3e-3}
    stored = {"features": features, "target": target, "batches": plan}
    online = {"tokens": tokens, "target": target, "batches": plan}
    reference = FakeStage(tmp_path / "stored", stored)
    train_dflash(TrainDflash(**{name: Ref(name) for name in stored}, **shape), reference)
    stage = FakeStage(tmp_path / "online", online, device=device.type)
    measured = {"capture": "online", "capture_batch_tokens": 300, "eval_every": 2, "eval_prompts": 2}
    train_dflash(TrainDflash(**{name: Ref(name) for name in online}, **shape, **measured), stage)
    for name in ("train/loss", "train/grad_norm"):
        limit = tolerance(device, 1e-4, 5e-3)
        assert stage.metric(name) == pytest.approx(reference.metric(name), rel=limit)
    assert len(stage.metric("train/loss")) == 3
    assert all(tau >= 1 for tau in stage.metric("val/tau"))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl"])
def test_answers_decoded_on_the_device_in_batches_are_those_of_a_cpu_one_by_one(device, family, tmp_path):
    target, samples = family_case(family, tmp_path)
    draft = draft_for_family()
    plain = [decode_plain(target, sample, NEW) for sample in samples]
    speculative = [decode_speculative(target, draft, sample, NEW) for sample in samples]
    target.model.to(device)
    moved, draft = evolve(target, device=device), draft.to(device)
    assert_same(plain, decode_plain_batch(moved, samples, DecodeSettings(NEW)))
    assert_same(speculative, decode_speculative_batch(moved, draft, samples, DecodeSettings(NEW)))


def assert_same(expected, found):
    assert [(one.tokens, one.accepted) for one in expected] == [(one.tokens, one.accepted) for one in found]
    for one, other in zip(expected, found, strict=True):
        assert other.margins == pytest.approx(one.margins, abs=1e-3)
