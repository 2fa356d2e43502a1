"""A target whose RoPE follows the longest text of a batch: samples beyond its first range are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from any_targets import any_checkpoint
from attrs import frozen
from chat_samples import write_short_and_long
from fake_stage import FakeStage

from dsl.errors import DataError
from dsl.op import Ref
from executor.cli import main
from ops.artifacts import (
    BatchPlan,
    Draft,
    DraftCheckpoint,
    ImageSamples,
    Report,
    Samples,
    TargetFeatures,
    TargetModel,
    TokenShards,
)
from ops.capture_targets.conflicts import conflicts as of_capture
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.evaluate.conflicts import conflicts as of_evaluation
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
from ops.lib.forecasts import TargetStated, TokensForecast
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.regenerate_answers.conflicts import conflicts as of_answers
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.run import regenerate_answers
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat
from ops.train_dflash.conflicts import conflicts as of_training
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash

RANGE, POSITIONS = 64, 512
FACTORS = {"short_factor": [1.0 + 0.01 * k for k in range(8)], "long_factor": [1.0 + k for k in range(8)]}
ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS}
FIELDS = {"rope_parameters": ROPE, "original_max_position_embeddings": RANGE, "max_position_embeddings": POSITIONS}
BEYOND = f"and beyond {RANGE} the target's RoPE turns all texts of a batch by other angles"
SIZES: dict[str, Any] = {"block_size": 4, "num_layers": 1, "num_anchors": 8, "seed": 0}
A, B, C = Ref("a"), Ref("b"), Ref("c")


def made(folder: Path, config: Any, run: Any, output: Any, **inputs: Any) -> Any:
    stage = FakeStage(folder, inputs)
    run(config, stage)
    return stage.artifact(output)


def answering(tokens: int) -> Evaluate:
    return Evaluate(draft=A, target=B, tokens=C, max_new_tokens=tokens, max_prompts=1, seed=0)


def asking(prompt: int, answer: int) -> RegenerateAnswers:
    return RegenerateAnswers(samples=A, target=B, max_prompt_tokens=prompt, max_new_tokens=answer)


@frozen
class Made:
    """Artifacts up to the tokens. long: with samples beyond the range; short: without them."""

    samples: ImageSamples
    target: TargetModel
    long: TokenShards
    short: TokenShards


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("range")
    checkpoint = any_checkpoint("phi3", folder / "checkpoint", **FIELDS)
    target = made(folder / "target", LoadTarget(checkpoint=str(checkpoint)), load_target, TargetModel)
    source = str(write_short_and_long(folder / "a.jsonl"))
    samples = made(folder / "ingest", Ingest(source=source, seed=0), ingest, Samples)
    images = made(folder / "images", InjectImages(samples=A), inject_images, ImageSamples, samples=samples)

    def tokens(name: str, **fields: Any) -> TokenShards:
        config = TokenizeChat(samples=A, target=B, min_loss_tokens=4, **fields)
        return made(folder / name, config, tokenize_chat, TokenShards, samples=images, target=target)

    return Made(images, target, tokens("long"), tokens("short", max_length=RANGE))


def test_a_capture_and_a_training_that_captures_name_the_samples_beyond_the_range_before_they_load_the_target(
    chain: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = {row["id"]: row["tokens"] for row in TokenReader(chain.long, "train").records}
    assert lengths["short"] <= RANGE < lengths["long"] < lengths["longer"] <= POSITIONS
    plan = made(
        tmp_path / "shard",
        ShardSequence(tokens=A, tokens_per_step=256, epochs=1, seed=0),
        shard_sequence,
        BatchPlan,
        tokens=chain.long,
    )
    given = {"target": chain.target, "tokens": chain.long}
    capture = CaptureTargets(tokens=A, target=B, target_layer_ids=(0, 2))
    online = TrainDflash(tokens=A, batches=B, target=C, capture="online", target_layer_ids=(0, 2), **SIZES)
    monkeypatch.delattr("ops.lib.target.model.Target.load")
    for name, run, config, inputs in (
        ("capture", capture_targets, capture, given),
        ("train", train_dflash, online, {**given, "batches": plan}),
    ):
        with pytest.raises(DataError, match=rf"samples long, longer: up to {lengths['longer']} tokens, {BEYOND}"):
            run(config, FakeStage(tmp_path / name, inputs))  # type: ignore[operator]


def test_what_is_within_the_range_is_captured_trained_and_evaluated_and_longer_answers_are_not(
    chain: Made, tmp_path: Path
) -> None:
    given = {"target": chain.target, "tokens": chain.short}
    assert ["short"] == [row["id"] for row in TokenReader(chain.short, "train").records]
    capture = CaptureTargets(tokens=A, target=B, target_layer_ids=(0, 2))
    features = made(tmp_path / "capture", capture, capture_targets, TargetFeatures, **given)
    plan = made(
        tmp_path / "shard",
        ShardSequence(features=A, tokens_per_step=64, epochs=1, seed=0),
        shard_sequence,
        BatchPlan,
        features=features,
    )
    training = TrainDflash(features=A, batches=B, target=C, **SIZES)
    inputs = {**given, "features": features, "batches": plan}
    trained = made(tmp_path / "train", training, train_dflash, DraftCheckpoint, **inputs)
    stage = FakeStage(tmp_path / "export", {"draft": trained, "target": chain.target})
    export_draft(ExportDraft(draft=A, target=B, formats=("sglang", "speculators")), stage)
    given = {**given, "draft": stage.artifact(Draft)}
    report = made(tmp_path / "fits", answering(RANGE - 60), evaluate, Report, **given)
    assert {"errors": 0, "ties": 0} == read_json(report.path / "report.json")["lossless"]
    too_many = r"the 60 positions of the target \(original_max_position_embeddings, less a block, of its config\.json\)"
    with pytest.raises(DataError, match=too_many):
        evaluate(answering(40), FakeStage(tmp_path / "evaluate", given))
    card = (stage.out_dir / "README.md").read_text()
    assert f" --context-length {RANGE - 4} " in card and f" --max-model-len {RANGE} " in card
    for engine, flag in (("SGLang", "--context-length"), ("vLLM", "--max-model-len")):
        assert f"With {engine}: beyond {RANGE} tokens the target's RoPE turns" in card
        assert f"{flag} of the command refuses such requests" in card


def test_an_answer_that_may_cross_the_range_is_refused_before_anything_is_generated(
    chain: Made, tmp_path: Path
) -> None:
    stage = FakeStage(tmp_path, {"samples": chain.samples, "target": chain.target})
    refused = rf"= 40 \+ 30 = 70 tokens, and the target has {RANGE} positions \(original_max_position_embeddings of"
    with pytest.raises(DataError, match=refused):
        regenerate_answers(asking(40, 30), stage)


TRAINING = {"tokens": A, "batches": B, "target": C, "target_layer_ids": (0, 2), **SIZES}
CASES: tuple[tuple[Callable[..., dict[str, str]], Any, int, str | None], ...] = (
    (of_capture, CaptureTargets(tokens=A, target=B, target_layer_ids=(0, 2)), RANGE + 1, "tokens"),
    (of_capture, CaptureTargets(tokens=A, target=B, target_layer_ids=(0, 2)), RANGE, None),
    (of_training, TrainDflash(capture="online", **TRAINING), RANGE + 1, "tokens"),
    (of_training, TrainDflash(capture="online", **TRAINING), RANGE, None),
    (of_answers, asking(RANGE - 8, 9), 0, "max_prompt_tokens"),
    (of_answers, asking(RANGE - 8, 8), 0, None),
    (of_evaluation, answering(RANGE - 1), 0, "max_new_tokens"),
    (of_evaluation, answering(RANGE - 2), 0, None),
)


@pytest.mark.parametrize(("conflicts", "config", "longest", "field"), CASES)
def test_each_op_says_by_field_what_is_beyond_the_range(
    chain: Made, conflicts: Callable[..., dict[str, str]], config: Any, longest: int, field: str | None
) -> None:
    tokens = TokensForecast(by_split=None, expected=None, longest=longest, vocab_size=None)
    target = TargetStated.read(chain.target.path, chain.target.digest)
    forecast: Mapping[str, Any] = {"target": target, "tokens": tokens, "samples": None, "draft": None}
    found = conflicts(config, forecast)
    assert ([] if field is None else [field]) == [*found]
    if field == "tokens":
        assert f"samples of up to {longest} tokens, {BEYOND}" in found[field]


PIPELINE = """
[pipeline]
name = "ranged"

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

[node.tokenize]
op = "tokenize_chat"
samples = "@inject"
target = "@target"
max_length = 65

[node.capture]
op = "capture_targets"
tokens = "@tokenize"
target = "@target"
target_layer_ids = [0, 2]
"""


def test_a_plan_refuses_longer_samples_and_doctor_takes_the_target_up_to_its_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    any_checkpoint("phi3", tmp_path / "target", **FIELDS)
    write_short_and_long(tmp_path / "chat.jsonl")
    (tmp_path / "a.toml").write_text(PIPELINE)
    assert 2 == main(["plan", "a.toml"])
    said = " ".join("".join(capsys.readouterr()).split())
    assert f"samples of up to 65 tokens, {BEYOND}" in said
    assert "max_length = 64 of tokenize_chat" in said
    assert 0 == main(["plan", "a.toml", "-s", "tokenize.max_length=64"])
    capsys.readouterr()
    assert 0 == main(["doctor", "--target", "target"])
    *lines, verdict = capsys.readouterr().out.splitlines()
    [lengths] = [line for line in lines if line.startswith("lengths ")]  # of the copy: the weights are not tried so
    assert lengths.startswith(
        "lengths      limit  texts of up to 64 tokens are right; a longer one changes shorter ones"
    )
    assert lengths.endswith("so texts of more than 64 tokens are refused")
    assert "so                  it can be a target, for texts of up to 64 tokens" == verdict
