"""Training on float8 features equals training on what they decode to, bit by bit; captured online they are the same."""

from __future__ import annotations

import shutil
from itertools import pairwise

import pytest
import torch
from fake_stage import FakeStage
from online_cases import ONLINE
from safetensors.torch import load_file

from dsl.op import Ref
from ops.artifacts import BatchPlan, TargetFeatures
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.lib.data.files import read_json, write_json
from ops.lib.data.token_shards import TokenReader
from ops.lib.target.feature_shards import FeatureReader, write_feature_shard
from ops.lib.target.float8 import Float8States, decoded
from ops.lib.target.model import Target
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.tools.diagnose.features import features_finding
from ops.train_dflash.batches import Place, Rows, draw, pack
from ops.train_dflash.online import Capture, CapturedStates, describe_features
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash
from ops.train_dflash.staging import Direct

CPU = torch.device("cpu")
SHAPE = {"block_size": 8, "num_layers": 1, "num_anchors": 8, "seed": 0, "loss": "kl", "log_every": 1, "max_steps": 3}


@pytest.fixture(scope="module")
def float8(tokens, target, tmp_path_factory):
    stage = FakeStage(tmp_path_factory.mktemp("float8"), {"tokens": tokens, "target": target})
    config = CaptureTargets(
        tokens=Ref("tokenize"), target=Ref("target"), shard_tokens=1500, final_hidden=True, feature_dtype="float8"
    )
    capture_targets(config, stage)
    return stage.artifact(TargetFeatures)


@pytest.fixture(scope="module")
def plan(tokens, tmp_path_factory):
    stage = FakeStage(tmp_path_factory.mktemp("plan"), {"tokens": tokens})
    shard_sequence(ShardSequence(tokens=Ref("tokens"), tokens_per_step=640, seed=0), stage)
    return stage.artifact(BatchPlan)


def as_plain(features, folder, dtype):
    """The features decoded, as an artifact of an ordinary capture in this dtype."""
    folder.mkdir()
    info = read_json(features.path / "features.json")
    del info["feature_dtype"]
    for shard in info["shards"]:
        tensors = load_file(features.path / shard["file"])
        states = [
            torch.cat([
                (scale * part).to(dtype)
                for scale, part in zip(
                    tensors[f"{name}_scales"].split(1, dim=1), tensors[name].float().split(128, dim=1), strict=True
                )
            ], dim=1)
            for name in ("features", "final_hidden")
        ]  # fmt: skip
        labels = tensors["input_ids"], tensors["loss_mask"], tensors["token_offsets"]
        write_feature_shard(folder / shard["file"], states[0], *labels, states[1])
    write_json(folder / "features.json", info | {"dtype": str(dtype).removeprefix("torch.")})
    return TargetFeatures(folder, "plain")


def train(folder, inputs, **changes):
    stage = FakeStage(folder, inputs)
    train_dflash(TrainDflash(**{name: Ref(name) for name in inputs}, **SHAPE | changes), stage)
    return stage


def test_a_training_on_float8_features_has_the_weights_of_one_on_the_decoded_ones(float8, target, plan, tmp_path):
    plain = as_plain(float8, tmp_path / "plain", torch.float32)
    runs = [
        train(tmp_path / name, {"features": features, "target": target, "batches": plan})
        for name, features in (("a", float8), ("b", plain))
    ]
    first, second = (load_file(run.out_dir / "model.safetensors") for run in runs)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert runs[0].metric("train/loss") == runs[1].metric("train/loss")
    assert "float8" == read_json(runs[0].out_dir / "training.json")["captured"]["feature_dtype"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_sequence_parallel_rank_computes_on_its_slice_of_the_decoded_features(float8, tmp_path, dtype):
    plain = FeatureReader(as_plain(float8, tmp_path / "plain", dtype), "train")
    reader = FeatureReader(float8, "train")
    drawn = [draw(reader, index, torch.ones(8), 6, seed=0, epoch=0) for index in range(5)]
    drawn = [one for one in drawn if len(one.anchors_A)]
    sizes = []
    for degree in (1, 3):
        for rank in range(degree):
            place = Place(dp_rank=0, dp_size=1, sp_rank=rank, sp_degree=degree, device=CPU, dtype=dtype)
            sent, arrival = pack(reader, drawn, place, with_teacher=True).send(Direct(CPU))
            batch = arrival.arrive(sent)
            expected, _ = pack(plain, drawn, place, with_teacher=True).send(Direct(CPU))
            for name in ("features_tF", "teacher_UM", "teacher_rows_NK"):
                one, other = getattr(expected, name), getattr(batch, name)
                assert one.dtype == other.dtype
                assert torch.equal(one, other)
            sizes.append((batch.features_tF.nbytes, sent.features_tF.nbytes))
    assert all(whole == dtype.itemsize * sent for whole, sent in sizes)  # it travels as float8


def test_online_float8_states_are_the_encoded_ones_of_an_online_capture_and_stay_so_until_packed(tokens, target):
    options = ONLINE | {"loss": "kl"}
    rows = [Rows(5, 3, 9), Rows(0, 0, 4), Rows(40, 7, 20), Rows(7, 0, 0)]
    states = [
        Capture(tokens, target, describe_features(TrainDflash(**options, **changes), tokens, target), CPU, 256).take(
            "train", rows
        )
        for changes in ({}, {"feature_dtype": "float8"})
    ]
    plain, float8 = states
    for one, other, layers in ((plain.features, float8.features, 5), (plain.final_hidden, float8.final_hidden, 1)):
        expected = Float8States.encode(one, layers)
        assert torch.equal(expected.values_TW.view(torch.uint8), other.values_TW.view(torch.uint8))
        assert torch.equal(expected.scales_TL, other.scales_TL)
    assert () == plain.errors
    assert 6 == len(float8.errors)
    assert all(0.02 < error < 0.03 for error in float8.errors)
    lengths = token_lengths(tokens, rows)
    assert sum(lengths) == len(float8.final_hidden)
    cut = CapturedStates.cut(float8, rows, lengths, 640)
    starts = [0, 6, 10, 23, 23]
    for row, (first, last) in zip(rows, pairwise(starts), strict=True):
        assert torch.equal(
            decoded(cut.features(row.index, row.first, row.last)), float8.features.decode(torch.float32)[first:last]
        )


def token_lengths(tokens, rows):
    records = TokenReader(tokens, "train").records
    return [records[row.index]["tokens"] for row in rows]


def test_an_online_training_in_float8_measures_the_error_and_has_nearly_the_curve_of_stored_float8(
    tokens, target, plan, float8, tmp_path, capsys
):
    inputs = {"tokens": tokens, "target": target, "batches": plan}
    online = train(tmp_path / "online", inputs, capture="online", feature_dtype="float8")
    stored = train(tmp_path / "stored", {"features": float8, "target": target, "batches": plan})
    assert online.metric("train/loss") == pytest.approx(stored.metric("train/loss"), rel=1e-3)
    errors = {name for name in online.logged[0][0] if "float8_error" in name}
    assert {*(f"train/float8_error_layer_0{layer}" for layer in range(1, 6)), "train/float8_error_final"} == errors
    assert all(0.02 < online.logged[0][0][name] < 0.03 for name in errors)
    assert not any("float8" in name for metrics, _ in stored.logged for name in metrics)
    assert [] == online.warnings
    captured = [read_json(run.out_dir / "training.json")["captured"] for run in (online, stored)]
    assert captured[0] == captured[1]
    rows = sum(FeatureReader(float8, "train").lengths) + sum(FeatureReader(float8, "val").lengths)
    assert f"online: {rows * 6 * 132 / 1e9:.2f} GB of features" in capsys.readouterr().out


def test_diagnose_takes_the_rounding_of_float8_for_rounding_and_another_layer_for_what_it_is(
    tokens, target, float8, tmp_path
):
    loaded = Target.load(target)
    finding = features_finding(loaded, float8, tokens, is_online=False)
    assert "good" == finding.level
    assert "float8)" in finding.what
    shutil.copytree(float8.path, tmp_path / "moved")
    info = read_json(float8.path / "features.json")
    write_json(tmp_path / "moved" / "features.json", info | {"target_layer_ids": [0, 1, 2, 3, 4]})
    moved = features_finding(loaded, TargetFeatures(tmp_path / "moved", "moved"), tokens, is_online=False)
    assert "error" == moved.level
