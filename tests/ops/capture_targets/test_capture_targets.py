"""Captured features against an independent hook, resuming, and every kind of refusal."""

from __future__ import annotations

import json
import shutil
import weakref

import pytest
import torch
from fake_stage import FakeStage, folder_digest
from family_checkpoints import make_checkpoint
from safetensors.torch import load_file

from dsl.errors import ConfigError, DataError, StopRequested
from dsl.op import Ref
from ops.artifacts import TargetFeatures, TargetModel, TokenShards
from ops.capture_targets.backend import HuggingFaceBackend
from ops.capture_targets.layers import spread_layers
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_shard, capture_targets, plan_shards
from ops.capture_targets.writing import Shard
from ops.lib.data.batching import batches_by_length
from ops.lib.data.token_shards import TokenReader
from ops.lib.target.feature_shards import FeatureReader
from ops.lib.target.model import Target
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target


def config(**changes):
    return CaptureTargets(tokens=Ref("tokenize"), target=Ref("target"), **{"shard_tokens": 1500, **changes})


def run(tmp_path, tokens, target, **changes):
    stage = FakeStage(tmp_path, {"tokens": tokens, "target": target})
    capture_targets(config(**changes), stage)
    return stage


def test_features_are_the_inputs_of_the_next_layer_deepstack_included(tokens, target, features):
    reader, captured = TokenReader(tokens, "train"), FeatureReader(features, "train")
    model = Target.load(target).model
    image = next(i for i, record in enumerate(reader.records) if record["category"] == "image")
    text = next(i for i, record in enumerate(reader.records) if record["category"] == "text")
    for index in (image, text):
        sample = reader.sample(index)
        inputs = {}

        def keep(module, args, kwargs, output, inputs=inputs):
            inputs[module.self_attn.layer_idx] = args[0] if args else kwargs["hidden_states"]

        handles = [layer.register_forward_hook(keep, with_kwargs=True) for layer in model.model.language_model.layers]
        arguments = {}
        if len(sample.image_grid_thw):
            arguments = {
                "pixel_values": sample.pixel_values,
                "image_grid_thw": sample.image_grid_thw,
                "mm_token_type_ids": (sample.input_ids == reader.info["image_token_id"]).int()[None],
            }
        with torch.no_grad():
            model.model.rope_deltas = None
            output = model(input_ids=sample.input_ids[None], output_hidden_states=True, **arguments)
        for handle in handles:
            handle.remove()
        expected = torch.cat([inputs[k + 1][0] for k in (1, 2, 3, 4, 5)], dim=-1)
        features = captured.features(index, 0, captured.lengths[index])
        torch.testing.assert_close(features, expected, atol=2e-5, rtol=1e-4)
        from_tuple = torch.stack([inputs[1][0], output.hidden_states[1][0]])
        difference = float((from_tuple[0] - from_tuple[1]).abs().max())
        # Deepstack adds visual features behind layer 0, so hidden_states is another tensor for images only.
        assert (difference > 1e-3) == (index == image)


def test_final_hidden_states_give_the_targets_own_logits_and_are_kept_where_asked_for(
    tmp_path, tokens, target, features
):
    stage = run(tmp_path, tokens, target, final_hidden=True, splits=("val",))
    captured = FeatureReader(stage.artifact(TargetFeatures), "val")
    assert captured.info["final_hidden"]
    loaded, reader = Target.load(target), TokenReader(tokens, "val")
    for index in range(len(reader)):
        with torch.no_grad():
            logits = loaded.forward(loaded.inputs([reader.sample(index)]), use_cache=False).logits[0]
        hidden = captured.final_hidden(index, 2, captured.lengths[index])
        torch.testing.assert_close(hidden @ loaded.head_weight.T, logits[2:], atol=2e-4, rtol=1e-4)
    assert "final_hidden" not in load_file(features.path / "val-00000.safetensors")


def test_ids_masks_and_lengths_are_those_of_the_tokens(tokens, features):
    for split in ("train", "val"):
        reader, captured = TokenReader(tokens, split), FeatureReader(features, split)
        assert len(reader) == len(captured)
        assert [record["tokens"] for record in reader.records] == captured.lengths
        for index in range(len(reader)):
            assert all(map(torch.equal, reader.labels(index), captured.labels(index)))


def test_features_json_says_where_the_features_come_from(tokens, target, features):
    info = json.loads((features.path / "features.json").read_text())
    shards = info.pop("shards")
    assert {
        "format": 1,
        "target": target.digest,
        "tokens": tokens.digest,
        "target_layer_ids": [1, 2, 3, 4, 5],
        "dtype": "float32",
        "hidden_size": 128,
        "num_target_layers": 8,
        "positions": "sequential",
        "backend": "huggingface",
        "final_hidden": False,
        "mask_token_id": TokenReader(tokens).info["mask_token_id"],
        "image_backend": "pillow",
        "pixel_limits": TokenReader(tokens).info["pixel_limits"],
    } == info
    for shard in shards:
        tensors = load_file(features.path / shard["file"])
        assert shard["tokens"] == len(tensors["features"]) == int(tensors["token_offsets"][-1])


def test_the_batch_size_changes_features_by_rounding_only(tokens, target, features, tmp_path):
    other = run(tmp_path, tokens, target, batch_tokens=300).out_dir
    for file in sorted(features.path.glob("*.safetensors")):
        ours, theirs = load_file(file)["features"], load_file(other / file.name)["features"]
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_a_stopped_capture_keeps_its_finished_shards_and_ends_with_the_same_bytes(tokens, target, features, tmp_path):
    stage = FakeStage(tmp_path, {"tokens": tokens, "target": target}, stop_after=2)
    with pytest.raises(StopRequested):
        capture_targets(config(), stage)
    finished = sorted(stage.work_dir.glob("*.safetensors"))
    times = [file.stat().st_mtime_ns for file in finished]
    assert len(finished) == 2
    again = FakeStage(tmp_path, {"tokens": tokens, "target": target})
    capture_targets(config(), again)
    assert times == [file.stat().st_mtime_ns for file in finished]
    assert folder_digest(features.path) == folder_digest(again.out_dir)


def test_half_a_shard_left_by_a_kill_is_not_taken_for_a_shard(tokens, target, features, tmp_path):
    stage = FakeStage(tmp_path, {"tokens": tokens, "target": target})
    (stage.work_dir / "train-00000.partial").write_bytes(b"half")
    capture_targets(config(), stage)
    assert folder_digest(features.path) == folder_digest(stage.out_dir)


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [(8, 5, (1, 2, 3, 4, 5)), (36, 5, (1, 9, 17, 25, 33)), (28, 5, (1, 7, 13, 19, 25)), (28, 1, (14,))],
)
def test_layers_are_spread_from_the_second_to_the_third_last(layers, count, expected):
    assert expected == spread_layers(layers, count)


def test_far_too_many_layers_are_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"no 99 distinct layers between its 2nd and 3rd-last; set it to at most 5"):
        spread_layers(8, 99)


def test_a_target_with_too_few_layers_is_refused():
    with pytest.raises(ConfigError, match=r"no 5 distinct layers.*\[1, 2, 2, 2, 3\]"):
        spread_layers(6, 5)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((1, 7), "7 is the last of 8 layers"),
        ((1, 9), "9 is out of range; this target has layers 0 to 7"),
    ],
)
def test_layer_ids_that_the_target_lacks_are_refused(tokens, target, tmp_path, ids, message):
    with pytest.raises(DataError, match=message):
        run(tmp_path, tokens, target, target_layer_ids=ids)


@pytest.mark.parametrize(
    ("ids", "message"),
    [((), "at least one"), ((1, 1), "each layer once"), ((3, 1), "ascending"), ((-1, 2), ">= 0")],
)
def test_layer_ids_that_no_target_has_are_refused_when_the_config_is_made(ids, message):
    with pytest.raises(ConfigError, match=message):
        config(target_layer_ids=ids)


def text_target(folder):
    """A text-only target with the tokenizer of the tests' tokens."""
    checkpoint = make_checkpoint("qwen3", folder / "checkpoint", vocab_size=600)
    stage = FakeStage(folder / "load")
    load_target(LoadTarget(checkpoint=str(checkpoint)), stage)
    return stage.artifact(TargetModel)


def other_patches(tokens, folder):
    """The tokens as if their images had patches of another size."""
    shutil.copytree(tokens.path, folder)
    info = json.loads((folder / "tokens.json").read_text())
    (folder / "tokens.json").write_text(json.dumps(info | {"patch_dim": 24, "merge_size": 1}))
    return TokenShards(folder, tokens.digest)


def test_images_that_the_target_cannot_see_are_refused(tokens, target, tmp_path):
    with pytest.raises(DataError, match="the target is a text model"):
        run(tmp_path, tokens, text_target(tmp_path / "text"))
    message = "patch_dim 24, and the target's is 96; merge_size 1, and the target's is 2"
    with pytest.raises(DataError, match=message):
        run(tmp_path, other_patches(tokens, tmp_path / "tokens"), target)


def test_tokens_of_a_larger_vocabulary_are_refused(tokens, target, tmp_path):
    folder = tmp_path / "wide"
    shutil.copytree(tokens.path, folder)
    info = json.loads((folder / "tokens.json").read_text())
    (folder / "tokens.json").write_text(json.dumps(info | {"vocab_size": 10_000}))
    with pytest.raises(DataError, match="need 10000 embeddings, and the target has 600"):
        run(tmp_path, TokenShards(folder, tokens.digest), target)


def test_tokens_of_another_tokenizer_are_refused(tokens, target, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(tokens.path, folder)
    info = json.loads((folder / "tokens.json").read_text())
    (folder / "tokens.json").write_text(json.dumps(info | {"eos_token_ids": [77]}))
    with pytest.raises(DataError, match=r"their EOS ids are \[77\], and the target ends at \[2\]; give tokenize_chat"):
        run(tmp_path, TokenShards(folder, tokens.digest), target)


def test_more_features_than_the_disk_holds_are_refused_before_the_first_one(tokens, target, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(DataError, match="free some, use another store"):
        run(tmp_path, tokens, target)
    assert list((tmp_path / "work").iterdir()) == []


def test_batches_stay_within_the_budget_and_hold_every_sample_once():
    lengths = [5, 90, 12, 7, 40, 40, 8]
    batches = batches_by_length(lengths, 64)
    assert sorted(range(7)) == sorted(index for batch in batches for index in batch)
    assert all(len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= 64 for batch in batches)


class WatchedReader(TokenReader):
    """A reader that knows how many of the samples it gave are still held by somebody."""

    def sample(self, index):
        sample = super().sample(index)
        self.held = getattr(self, "held", 0) + 1
        self.most_held = max(getattr(self, "most_held", 0), self.held)
        weakref.finalize(sample, self.let_go)
        return sample

    def let_go(self):
        self.held -= 1


def test_a_shard_in_the_making_holds_the_samples_of_two_batches_at_most(tokens, target, tmp_path):
    reader, loaded = WatchedReader(tokens, "train"), Target.load(target)
    plan, *_ = plan_shards("train", reader, 10_000)
    lengths = [record["tokens"] for record in reader.records[plan.start : plan.end]]
    largest = max(len(batch) for batch in batches_by_length(lengths, 400))
    assert largest < len(lengths) / 4
    capture_shard(
        Shard(lengths, torch.float32, (1, 2)), plan, HuggingFaceBackend(loaded), reader, (1, 2), config(), 400
    )
    assert largest <= reader.most_held <= 2 * largest
    assert 0 == reader.held


def test_bfloat16_features_are_stored_as_such(tokens, target, tmp_path):
    out = run(tmp_path, tokens, target, dtype="bfloat16", target_layer_ids=(2,)).out_dir
    stored = load_file(out / "train-00000.safetensors")["features"]
    assert (torch.bfloat16, 128) == (stored.dtype, stored.shape[1])
