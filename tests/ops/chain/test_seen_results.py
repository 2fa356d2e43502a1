"""Agents' conversations whose tools return images, from rows of OpenAI's form through every op of the chain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_stage import FakeStage
from family_checkpoints import make_checkpoint
from PIL import Image
from result_images import SHOWING

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
from ops.lib.data.token_shards import TokenReader
from ops.lib.target.feature_shards import FeatureReader
from ops.lib.target.model import Target
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash

COLOURS = ("red", "green", "blue", "white")
TOOL = {"type": "function", "function": {"name": "shot", "description": "Looks.", "parameters": {"type": "object"}}}


def row(number: int, **more: Any) -> dict[str, Any]:
    """Two rounds of a call and a picture of what it shows, the second beside a picture of the user's."""
    colour = COLOURS[number % 4]
    messages: list[dict[str, Any]] = []
    for place in (0, 1):
        own = [{"type": "image_url", "image_url": {"url": "map.png"}}] if place else []
        call = {"id": f"c{place}", "function": {"name": "shot", "arguments": json.dumps({"at": place})}}
        messages += [
            {"role": "user", "content": [*own, {"type": "text", "text": "Look."}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {
                "role": "tool",
                "tool_call_id": f"c{place}",
                "content": [
                    {"type": "text", "text": "page: "},
                    {"type": "image_url", "image_url": {"url": f"{number}-{place}.png"}},
                ],
            },
            {"role": "assistant", "content": f"It is {colour}, all over."},
        ]
    return {"id": f"chat-{number}", "tools": [TOOL], "messages": messages, **more}


def write_data(folder: Path, rows: int, held_out: int = 0) -> Path:
    folder.mkdir()
    Image.new("RGB", (24, 16), "yellow").save(folder / "map.png")
    written = []
    for number in range(rows):
        for place in (0, 1):
            Image.new("RGB", (16, 16 + 8 * place), COLOURS[number % 4]).save(folder / f"{number}-{place}.png")
        written.append(row(number, split="test" if number < held_out else "train"))
    (folder / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in written))
    (folder / "template").write_text(SHOWING["qwen3-vl"])
    return folder


def stage_of(folder: Path, config: Any, run: Any, output: Any, **inputs: Any) -> Any:
    stage = FakeStage(folder, inputs)
    run(config, stage)
    return stage.artifact(output)


def tokens_of(folder: Path, data: Path, processor: Path, **more: Any) -> TokenShards:
    samples = stage_of(folder / "ingest", Ingest(source=str(data / "data.jsonl"), seed=0), ingest, Samples)
    config: Any = InjectImages(samples=Ref("a"), image_policy="in-place")
    images = stage_of(folder / "inject", config, inject_images, ImageSamples, samples=samples)
    options: dict[str, Any] = {"contexts": "served", "min_loss_tokens": 1, "chat_template": str(data / "template")}
    config = TokenizeChat(samples=Ref("a"), processor=str(processor), **options | more)
    return stage_of(folder / "tokenize", config, tokenize_chat, TokenShards, samples=images)


def captured(folder: Path, tokens: TokenShards, target: TargetModel) -> TargetFeatures:
    config = CaptureTargets(tokens=Ref("a"), target=Ref("b"), target_layer_ids=(0, 2, 4))
    return stage_of(folder, config, capture_targets, TargetFeatures, tokens=tokens, target=target)


def of_transformers(target: TargetModel, reader: TokenReader, index: int) -> torch.Tensor:
    """The inputs of layers 1, 3 and 5 for a sample, of a run by transformers: float [S, 3 * hidden]."""
    model, sample = Target.load(target).model, reader.sample(index)
    inputs: dict[int, torch.Tensor] = {}
    handles = []
    for place, layer in enumerate(model.model.language_model.layers):

        def keep(module: Any, given: Any, named: Any, place: int = place) -> None:
            inputs[place] = given[0] if given else named["hidden_states"]

        handles.append(layer.register_forward_pre_hook(keep, with_kwargs=True))
    is_image = (sample.input_ids == reader.info["image_token_id"]).int()[None]
    with torch.no_grad():
        model(
            input_ids=sample.input_ids[None],
            pixel_values=sample.pixel_values,
            image_grid_thw=sample.image_grid_thw,
            mm_token_type_ids=is_image,
        )
    for handle in handles:
        handle.remove()
    return torch.cat([inputs[layer + 1][0] for layer in (0, 2, 4)], dim=-1)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_changed_pixel_of_a_result_changes_the_features_behind_it_and_none_before(family, tmp_path):
    checkpoint = make_checkpoint(family, tmp_path / "made", num_hidden_layers=6)
    target = stage_of(tmp_path / "target", LoadTarget(checkpoint=str(checkpoint)), load_target, TargetModel)
    data = write_data(tmp_path / "data", 3)
    tokens = tokens_of(tmp_path / "first", data, checkpoint)
    features = FeatureReader(captured(tmp_path / "features", tokens, target), "train")
    reader = TokenReader(tokens)
    before = [features.features(place, 0, features.lengths[place]) for place in range(3)]
    torch.testing.assert_close(before[2], of_transformers(target, reader, 2), atol=2e-4, rtol=1e-3)

    with Image.open(data / "1-0.png") as image:
        changed = image.copy()
    changed.putpixel((3, 3), (0, 0, 0))
    changed.save(data / "1-0.png")
    again = tokens_of(tmp_path / "second", data, checkpoint)
    features = FeatureReader(captured(tmp_path / "again", again, target), "train")
    ids = [record["id"] for record in reader.records]
    for place, name in enumerate(ids):
        after = features.features(place, 0, features.lengths[place])
        sample, other = reader.sample(place), TokenReader(again).sample(place)
        assert sample.input_ids.tolist() == other.input_ids.tolist()
        differs = (before[place] - after).abs().amax(dim=1) > 1e-6
        if name != "chat-1":
            assert not differs.any()
            continue
        image_tokens = (sample.input_ids == reader.info["image_token_id"]).nonzero().flatten()
        first = int(image_tokens[0])
        assert not differs[:first].any() and differs[first : first + 4].any()
        answer, turn = sample.answers[1]
        assert turn == 1 and differs[answer:].all()


def test_the_chain_learns_and_measures_answers_behind_images_of_results(target, tmp_path):
    data = write_data(tmp_path / "data", 7, held_out=1)
    checkpoint = target.path / "model"
    tokens = tokens_of(tmp_path, data, checkpoint)
    assert [3] * 7 == [len(TokenReader(tokens).sample(place).image_grid_thw) for place in range(7)]
    features = captured(tmp_path / "capture", tokens, target)
    config: Any = ShardSequence(features=Ref("a"), tokens_per_step=1024, epochs=1, seed=0)
    plan = stage_of(tmp_path / "shard", config, shard_sequence, BatchPlan, features=features)
    config = TrainDflash(
        features=Ref("a"), batches=Ref("b"), target=Ref("c"), block_size=4, num_layers=1, num_anchors=4, seed=0
    )
    trained = stage_of(
        tmp_path / "train", config, train_dflash, DraftCheckpoint, features=features, batches=plan, target=target,
        tokens=tokens,
    )  # fmt: skip
    config = ExportDraft(draft=Ref("a"), target=Ref("b"))
    draft = stage_of(tmp_path / "export", config, export_draft, Draft, draft=trained, target=target)
    config = Evaluate(
        draft=Ref("a"), target=Ref("b"), tokens=Ref("c"), max_new_tokens=4, prompts="each", max_prompts=None, seed=0,
        random_draft=False, bootstrap=20,
    )  # fmt: skip
    stage_of(tmp_path / "eval", config, evaluate, Draft, draft=draft, target=target, tokens=tokens)
    report = read_json(tmp_path / "eval" / "out" / "report.json")
    assert {"errors": 0, "ties": 0} == report["lossless"]
    assert {"0": 1, "1": 1, "2": 1, "3": 1} == {turn: tau["prompts"] for turn, tau in report["tau_by_turn"].items()}
    assert {"text": 1, "image": 3} == {name: report["tau"][name]["prompts"] for name in ("text", "image")}
    asked = {line["id"]: line["prompt_tokens"] for line in read_jsonl(tmp_path / "eval" / "out" / "prompts.jsonl")}
    assert asked["chat-0/1"] < asked["chat-0/2"] < asked["chat-0/3"] < asked["chat-0/4"]
