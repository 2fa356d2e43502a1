"""What the tests of several ops share, made once: a small chain up to features, and a target that knows its answers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from colour_chats import packed, trained  # noqa: F401 (fixtures of two files)
from device_cases import found_device
from fake_stage import FakeStage
from gate_cases import make_gate_inputs
from regenerate_cases import PARROTED, artifact_of, make_talker

from dsl.op import Ref
from ops.artifacts import ImageSamples, Samples, TargetFeatures, TargetModel, TokenShards
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.finetune_vlm.op import FinetuneVlm
from ops.finetune_vlm.run import finetune_vlm
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device(request) -> torch.device:
    """The device that --device names."""
    return found_device(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """A GPU, whatever --device says."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return found_device("cuda")


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> TokenShards:
    """About 40 digits and 40 pieces of prose, tokenised with a vocabulary of 600."""
    stage = FakeStage(tmp_path_factory.mktemp("ingest"))
    ingest(Ingest(source="builtin:digits", max_samples=40, seed=0), stage)
    samples = stage.artifact(Samples)
    stage = FakeStage(tmp_path_factory.mktemp("inject"), {"samples": samples})
    inject_images(InjectImages(samples=Ref("ingest")), stage)
    images = stage.artifact(ImageSamples)
    stage = FakeStage(tmp_path_factory.mktemp("tokenize"), {"samples": images})
    tokenize_chat(TokenizeChat(samples=Ref("inject"), vocab_size=600, shard_samples=16), stage)
    return stage.artifact(TokenShards)


@pytest.fixture(scope="session")
def target(tokens, tmp_path_factory) -> TargetModel:
    """A tiny Qwen3-VL after two steps of training."""
    stage = FakeStage(tmp_path_factory.mktemp("target"), {"tokens": tokens})
    finetune_vlm(FinetuneVlm(tokens=Ref("tokenize"), steps=2, batch_size=8, eval_samples=2, seed=0), stage)
    return stage.artifact(TargetModel)


@pytest.fixture(scope="session")
def features(tokens, target, tmp_path_factory) -> TargetFeatures:
    stage = FakeStage(tmp_path_factory.mktemp("capture"), {"tokens": tokens, "target": target})
    capture_targets(CaptureTargets(tokens=Ref("tokenize"), target=Ref("target"), shard_tokens=1500), stage)
    return stage.artifact(TargetFeatures)


@pytest.fixture(scope="session")
def talker(tmp_path_factory) -> TargetModel:
    """A tiny Qwen3-VL that knows the answers of regenerate_cases by heart."""
    return make_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture(scope="session")
def parroted(tmp_path_factory) -> ImageSamples:
    """The same questions, with answers in the data set that are unlike the target's."""
    return artifact_of(tmp_path_factory.mktemp("parroted") / "samples", lambda _: PARROTED)


@pytest.fixture(scope="session")
def gate_inputs(tokens, target, features, tmp_path_factory) -> dict[str, Any]:
    """The inputs of `check_export`: an exported draft, its target, the tokens and the report; "trained" beside them."""
    return make_gate_inputs(tmp_path_factory.mktemp("gate"), tokens, target, features)


@pytest.fixture
def damaged(gate_inputs: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The gate's inputs with a copy of the draft that a test may damage."""
    folder = shutil.copytree(gate_inputs["draft"].path, tmp_path / "damaged")
    return gate_inputs | {"draft": attrs.evolve(gate_inputs["draft"], path=folder)}
