"""Samples, and prompts with their answers, beyond the positions of the target: a plan refuses what the stages would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from any_targets import any_checkpoint
from chat_samples import write_short_and_long
from fake_stage import FakeStage

from dsl.errors import DataError
from dsl.op import Ref
from executor.cli import main
from ops.artifacts import ImageSamples, Samples, TargetFeatures, TargetModel, TokenShards
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images
from ops.lib.data.files import read_json, read_jsonl
from ops.lib.data.token_shards import TokenReader
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat

POSITIONS = 64
A, B = Ref("a"), Ref("b")
BEYOND = f"tokens, more than the {POSITIONS} positions of the target (max_position_embeddings of its config.json)"
UNKNOWN = f"tokens, more than max_position_embeddings = {POSITIONS} of the target's config.json, which states no RoPE"
NOPE = {"num_experts": 1, "num_experts_per_tok": 1, "use_mamba_kernels": False}
NOPE |= {"attn_layer_period": 2, "attn_layer_offset": 1}
ONLINE = (
    *("shard.features=none", "shard.tokens=@any"),
    *("train.features=none", "train.tokens=@any", "train.capture=online", "train.target_layer_ids=[0, 2]"),
)

PIPELINE = f"""
[pipeline]
name = "positions"

[mlflow]
tracking = false

[node.target]
op = "load_target"
checkpoint = "target"

[node.ingest]
op = "ingest"
source = "chat.jsonl"

[node.inject]
op = "inject_images"
samples = "@ingest"

[node.any]
op = "tokenize_chat"
samples = "@inject"
processor = "target"
min_loss_tokens = 4

[node.tokenize]
op = "tokenize_chat"
samples = "@inject"
processor = "target"
min_loss_tokens = 4
max_length = {POSITIONS}

[node.capture]
op = "capture_targets"
tokens = "@tokenize"
target = "@target"
target_layer_ids = [0, 2]

[node.shard]
op = "shard_sequence"
features = "@capture"

[node.train]
op = "train_dflash"
features = "@capture"
batches = "@shard"
target = "@target"
tokens = "@tokenize"
block_size = 4
eval_every = 1
eval_new_tokens = 4

[node.export]
op = "export_draft"
draft = "@train"
target = "@target"

[node.eval]
op = "evaluate"
draft = "@export"
target = "@target"
tokens = "@tokenize"
max_new_tokens = 4
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("positions")
    any_checkpoint("llama", folder / "target", max_position_embeddings=POSITIONS)
    any_checkpoint("jamba", folder / "nope", max_position_embeddings=POSITIONS, **NOPE)
    write_short_and_long(folder / "chat.jsonl")
    (folder / "a.toml").write_text(PIPELINE)
    (folder / "asked.jsonl").write_text('{"messages": [{"role": "user", "content": "How many?"}]}\n')
    return folder


@pytest.fixture
def plan(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Plans with overrides, and gives the exit code and what is shown, on one line."""
    monkeypatch.chdir(folder)

    def planned(*overrides: str) -> tuple[int, str]:
        code = main(["plan", "a.toml", *(argument for each in overrides for argument in ("-s", each))])
        return code, " ".join("".join(capsys.readouterr()).split())

    return planned


def test_before_tokens_are_stored_a_plan_warns_of_max_length_and_afterwards_it_refuses_by_the_real_lengths(
    folder: Path, plan: Any
) -> None:
    code, shown = plan("capture.tokens=@any", "train.tokens=@any")
    assert (0, True) == (code, f"warning: samples of up to 3,072 {BEYOND}" in shown)
    assert "should there be a longer one, this node refuses it by name" in shown
    code, shown = plan(*ONLINE)
    assert (0, True) == (code, f"train: warning: samples of up to 3,072 {BEYOND}" in shown)
    code, shown = plan()
    assert (0, False) == (code, "samples of up to" in shown)
    assert 2 == plan(f"eval.max_new_tokens={POSITIONS - 1}")[0]
    assert 0 == plan(f"eval.max_new_tokens={POSITIONS - 2}", f"train.eval_new_tokens={POSITIONS - 2}")[0]

    assert 0 == main(["run", "a.toml", "--to", "any", "--to", "tokenize"])
    stored = {row["id"]: row for file in folder.glob("**/samples.jsonl") for row in read_jsonl(file) if "tokens" in row}
    longest = stored["longer"]["tokens"]
    code, shown = plan("capture.tokens=@any", "train.tokens=@any")
    assert 2 == code
    assert f"node.capture.tokens: samples long, longer: up to {longest} {BEYOND}" in shown
    code, shown = plan(*ONLINE)
    assert (2, True) == (code, f"node.train.tokens: samples long, longer: up to {longest} {BEYOND}" in shown)
    of_others = ("capture.tokens=@any", "train.tokens=@any", 'capture.splits=["val", "test"]')
    assert "positions of the target" not in plan(*of_others)[1]
    code, shown = plan("capture.tokens=@any", "train.tokens=@any", "target.checkpoint=nope")
    assert f"warning: samples long, longer: up to {longest} {UNKNOWN}" in shown
    assert "node.capture.tokens" not in shown

    assert 0 == plan()[0]
    for field, split in (("eval.max_new_tokens", "test"), ("train.eval_new_tokens", "val")):
        prompt = stored[split]["prompt_tokens"]
        most = POSITIONS - prompt - 1
        assert 0 == plan(f"{field}={most}")[0]
        for asked in (most + 1, 1_000_000):
            code, shown = plan(f"{field}={asked}")
            assert 2 == code
            assert f"node.{field}: 1 of 1 prompts and their answers" in shown
            assert f"the {POSITIONS} positions of the target (max_position_embeddings of its config.json)" in shown
            total = prompt + asked + 1
            assert (
                f"(sample {split}: {prompt} + {asked + 1} = {total}): set {field.split('.')[1]} = {most} or less"
                in shown
            )
    asks = ("eval.benchmark=asked.jsonl", f"eval.max_new_tokens={POSITIONS - 1}")
    assert f"node.eval.max_new_tokens: no prompt fits beside {POSITIONS - 1} tokens in the" in plan(*asks)[1]


def made(folder: Path, config: Any, run: Any, output: Any, **inputs: Any) -> Any:
    stage = FakeStage(folder, inputs)
    run(config, stage)
    return stage.artifact(output)


def test_a_capture_refuses_longer_samples_by_name_and_warns_where_no_rope_is_stated(
    folder: Path, tmp_path: Path
) -> None:
    samples = made(tmp_path / "ingest", Ingest(source=str(folder / "chat.jsonl"), seed=0), ingest, Samples)
    images = made(tmp_path / "images", InjectImages(samples=A), inject_images, ImageSamples, samples=samples)
    tokenize = TokenizeChat(samples=A, processor=str(folder / "target"), min_loss_tokens=4)
    tokens = made(tmp_path / "tokens", tokenize, tokenize_chat, TokenShards, samples=images)
    longest = max(row["tokens"] for row in TokenReader(tokens, "train").records)
    capture = CaptureTargets(tokens=A, target=B, target_layer_ids=(0, 2))
    stages = {}
    for name in ("target", "nope"):
        config = LoadTarget(checkpoint=str(folder / name))
        target = made(tmp_path / name, config, load_target, TargetModel)
        stages[name] = FakeStage(tmp_path / f"capture-{name}", {"target": target, "tokens": tokens})
    with pytest.raises(DataError) as caught:
        capture_targets(capture, stages["target"])
    assert str(caught.value).startswith(f"samples long, longer: up to {longest} {BEYOND}")
    assert f"drop such samples with max_length = {POSITIONS} of tokenize_chat" in str(caught.value)
    capture_targets(capture, stages["nope"])
    features = stages["nope"].artifact(TargetFeatures)
    assert 4 == sum(shard["samples"] for shard in read_json(features.path / "features.json")["shards"])
    [warning] = [text for text in stages["nope"].warnings if "max_position_embeddings" in text]
    assert warning.startswith(f"samples long, longer: up to {longest} {UNKNOWN}")
