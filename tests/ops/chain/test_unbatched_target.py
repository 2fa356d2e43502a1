"""A target whose results padding changes is run one text at a time, by what load_target measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from any_targets import any_checkpoint
from fake_stage import FakeStage

from dsl.errors import DataError
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
from ops.capture_targets.backend import forward_batch
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.export_draft.op import ExportDraft
from ops.export_draft.run import export_draft
from ops.ingest.op import Ingest
from ops.ingest.run import ingest
from ops.inject_images.op import InjectImages
from ops.inject_images.run import inject_images
from ops.lib.data.files import read_json, read_jsonl, write_json
from ops.lib.data.token_shards import TokenReader
from ops.lib.forecasts import TargetStated
from ops.lib.target.feature_shards import FeatureReader
from ops.lib.target.model import Target
from ops.lib.target.probed import BLOCKS, MEASURED, PADDING, SPECULATION, Check, Probe
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.regenerate_answers.conversations import Prompts
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.run import regenerate_answers
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat
from ops.tools.diagnose import bench
from ops.tools.diagnose.chain import Chain
from ops.tools.diagnose.run import diagnose
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash

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


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageSamples:
    folder = tmp_path_factory.mktemp("samples")
    samples = made(folder / "ingest", Ingest(source=str(rows(folder / "a.jsonl")), seed=0), ingest, Samples)
    return made(folder / "images", InjectImages(samples=Ref("a")), inject_images, ImageSamples, samples=samples)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    """A target whose recurrent state padding changes."""
    folder = tmp_path_factory.mktemp("target")
    sizes = {"head_dim": 16, "lru_width": 64, "attention_window_size": 64}
    checkpoint = any_checkpoint("recurrent_gemma", folder / "checkpoint", **sizes)
    return made(folder / "target", LoadTarget(checkpoint=str(checkpoint)), load_target, TargetModel)


def test_what_fails_is_part_of_the_targets_content_so_that_another_verdict_is_another_artifact(
    tmp_path: Path, target: TargetModel
) -> None:
    assert ["blocks", "padding", "speculation"] == read_json(target.path / "target.json")["fails"]
    sound = any_checkpoint("llama", tmp_path / "checkpoint")
    held = made(tmp_path / "target", LoadTarget(checkpoint=str(sound)), load_target, TargetModel)
    assert "fails" not in read_json(held.path / "target.json")


def test_features_are_those_of_single_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], images: ImageSamples, target: TargetModel
) -> None:
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


ANSWER = 12


def greedy(target: TargetModel, images: ImageSamples, config: RegenerateAnswers) -> dict[str, str]:
    """The answer to each sample by the model alone: one text, without padding and without a cache."""
    model, prompts, found = Target.load(target), Prompts.load(config, target, images.path), {}
    for row in read_jsonl(images.path / "samples.jsonl"):
        ids = prompts.sample({**row, "messages": row["messages"][:1]}).input_ids
        start = len(ids)
        while len(ids) < start + ANSWER and int(ids[-1]) not in model.eos_token_ids:
            with torch.no_grad():
                ids = torch.cat([ids, model.model(input_ids=ids[None], use_cache=False).logits[0, -1:].argmax(-1)])
        answer = ids[start:].tolist()
        found[row["id"]] = prompts.text(answer[:-1] if answer[-1] in model.eos_token_ids else answer)
    return found


def test_answers_are_those_of_single_texts_and_padded_batches_would_give_others(
    tmp_path: Path, images: ImageSamples, target: TargetModel, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RegenerateAnswers(
        samples=Ref("a"),
        target=Ref("b"),
        temperature=0.0,
        max_new_tokens=ANSWER,
        max_prompt_tokens=400,
        min_answer_tokens=1,
        batch_tokens=4096,
        drop_retokenised=False,
        finish_reasons=("stop", "length"),
        dtype="float32",
    )
    unmeasured = TargetModel(shutil.copytree(target.path, tmp_path / "unmeasured"), "1" * 64)
    (unmeasured.path / MEASURED).unlink()

    def answers(name: str, of: TargetModel) -> dict[str, str]:
        given = {"samples": images, "target": of}
        made_by = made(tmp_path / name, config, regenerate_answers, ImageSamples, **given)
        return {
            row["id"]: row["messages"][1]["content"][0]["text"] for row in read_jsonl(made_by.path / "samples.jsonl")
        }

    alone = greedy(target, images, config)
    assert 4 == len(alone)
    capsys.readouterr()
    assert alone == answers("one_by_one", target)
    assert "padded batches give what single texts give" in capsys.readouterr().out
    assert alone != answers("padded", unmeasured)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, images: ImageSamples) -> Chain:
    """A draft of a target that decodes in batches, and all that a diagnosis reads."""
    folder = tmp_path_factory.mktemp("llama")
    checkpoint = any_checkpoint("llama", folder / "checkpoint")
    target = made(folder / "target", LoadTarget(checkpoint=str(checkpoint)), load_target, TargetModel)
    chat = TokenizeChat(samples=Ref("a"), target=Ref("b"), min_loss_tokens=8)
    tokens = made(folder / "tokens", chat, tokenize_chat, TokenShards, samples=images, target=target)
    given = {"tokens": tokens, "target": target}
    capture = CaptureTargets(tokens=Ref("a"), target=Ref("b"), target_layer_ids=LAYERS)
    features = made(folder / "capture", capture, capture_targets, TargetFeatures, **given)
    shard = ShardSequence(features=Ref("a"), tokens_per_step=256, epochs=1, seed=0)
    plan = made(folder / "shard", shard, shard_sequence, BatchPlan, features=features)
    edges = {"features": Ref("a"), "batches": Ref("b"), "target": Ref("c")}
    training = TrainDflash(block_size=4, num_layers=1, num_anchors=8, seed=0, **edges)
    trained = made(
        folder / "train", training, train_dflash, DraftCheckpoint, features=features, batches=plan, target=target
    )
    export = ExportDraft(draft=Ref("a"), target=Ref("b"))
    draft = made(folder / "export", export, export_draft, Draft, draft=trained, target=target)
    return Chain(
        node="export",
        draft=draft,
        target=target,
        judged=tokens,
        training=trained,
        features=features,
        learnt=tokens,
        is_online=False,
        regenerated_at=None,
        kept_by=None,
        losses=(),
        evaluation=None,
        answered=None,
        asks_each=False,
        split="train",
        other_splits=(),
        max_new_tokens=ANSWER,
        dtype="float32",
        batch_size=4,
        device="cpu",
    )


def probed(chain: Chain, failed: str) -> None:
    """Have load_target's measurements say that one check failed, or none."""
    checks = tuple(Check(name, name != failed, 0.5) for name in (PADDING, BLOCKS, SPECULATION))
    write_json(chain.target.path / MEASURED, {"probes": [Probe("the weights", checks, 0.1).to_json()]})


def test_a_diagnosis_decodes_one_by_one_where_padding_changes_results_and_not_where_drafts_are_not_verified(
    llama: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, counts, said = bench.decode_speculative_batch, [], []

    def counted(target: Any, draft: Any, prompts: Any, settings: Any, use: Any) -> Any:
        counts.append(len(prompts))
        return decode(target, draft, prompts, settings, use)

    monkeypatch.setattr(bench, "decode_speculative_batch", counted)
    taus = {}
    for failed, sizes in (("", {4}), (PADDING, {1})):
        probed(llama, failed)
        counts.clear()
        taus[failed] = diagnose(llama, 4, [], "again", said.append, 1e9)["tau"]["exported"]
        assert sizes == set(counts)
    assert taus[""] == pytest.approx(taus[PADDING])
    assert any("padded batches give what single texts give" in text for text in said)
    probed(llama, BLOCKS)
    with pytest.raises(DataError, match="export: measured on the weights: it does not hold that blocks through"):
        diagnose(llama, 4, [], "again", said.append, 1e9)
