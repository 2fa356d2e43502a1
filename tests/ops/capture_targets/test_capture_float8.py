"""Features stored as float8: the encoded states of a plain capture, across a stop, measured and warned of."""

from __future__ import annotations

import shutil

import pytest
import torch
from fake_stage import FakeStage, folder_digest
from safetensors.torch import load_file, save_file

from dsl.errors import DataError, StopRequested
from dsl.op import Ref
from ops.artifacts import TargetFeatures, TargetModel
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.plan import feature_bytes
from ops.capture_targets.run import capture_targets
from ops.capture_targets.show import report
from ops.lib.data.files import read_json, write_json
from ops.lib.forecasts import read_target_config
from ops.lib.target.feature_shards import FeatureReader
from ops.lib.target.float8 import Float8States, decoded
from ops.lib.target.sizes import TargetSizes


def run(folder, tokens, target, stop_after=None, **changes):
    stage = FakeStage(folder, {"tokens": tokens, "target": target}, stop_after=stop_after)
    values = {"shard_tokens": 100, "splits": ("val",), "final_hidden": True, **changes}
    capture_targets(CaptureTargets(tokens=Ref("tokenize"), target=Ref("target"), **values), stage)
    return stage


@pytest.fixture(scope="module")
def plain(tokens, target, tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain"), tokens, target)


@pytest.fixture(scope="module")
def float8(tokens, target, tmp_path_factory):
    return run(tmp_path_factory.mktemp("float8"), tokens, target, feature_dtype="float8")


def test_shards_hold_the_encoded_states_of_a_plain_capture_bit_by_bit(plain, float8):
    files = sorted(file.name for file in plain.out_dir.glob("*.safetensors"))
    assert len(files) > 1
    for file in files:
        stored, theirs = load_file(float8.out_dir / file), load_file(plain.out_dir / file)
        for name, layers in (("features", 5), ("final_hidden", 1)):
            expected = Float8States.encode(theirs.pop(name), layers)
            assert torch.equal(expected.values_TW.view(torch.uint8), stored.pop(name).view(torch.uint8))
            assert torch.equal(expected.scales_TL, stored.pop(f"{name}_scales"))
        assert 6 == len(stored.pop("float8_errors"))
        assert theirs.keys() == stored.keys()
        assert all(torch.equal(theirs[name], stored[name]) for name in theirs)


def test_the_reader_gives_scales_with_any_rows_and_decodes_to_what_was_captured_but_for_rounding(plain, float8):
    ours, theirs = (FeatureReader(stage.artifact(TargetFeatures), "val") for stage in (float8, plain))
    for index, length in enumerate(ours.lengths):
        rows = decoded(ours.features(index, 1, length))
        assert torch.equal(rows[2:5], decoded(ours.features(index, 3, 6)))
        for read in ("features", "final_hidden"):
            exact = getattr(theirs, read)(index, 1, length)
            found = decoded(getattr(ours, read)(index, 1, length))
            assert 0 < float((found - exact).norm() / exact.norm()) < 1 / 16


def test_a_stopped_capture_of_float8_goes_on_with_its_shards_and_ends_with_the_same_bytes(
    tokens, target, float8, tmp_path
):
    with pytest.raises(StopRequested):
        run(tmp_path, tokens, target, stop_after=1, feature_dtype="float8")
    (finished,) = (tmp_path / "work").glob("*.safetensors")
    written = finished.stat().st_mtime_ns
    again = run(tmp_path, tokens, target, feature_dtype="float8")
    assert written == finished.stat().st_mtime_ns
    assert folder_digest(float8.out_dir) == folder_digest(again.out_dir)
    assert again.logged == float8.logged


def test_the_bytes_a_token_are_those_of_the_files_of_the_disk_check_and_of_the_plan(
    tokens, target, float8, plain, tmp_path, capsys
):
    sizes = TargetSizes.of(read_target_config(target.path / "model"))
    rows = sum(FeatureReader(float8.artifact(TargetFeatures), "val").lengths)
    for stage, dtype, states in ((float8, "float8", 6 * (128 + 4)), (plain, None, 6 * 128 * 4)):
        assert states + 5 == feature_bytes(sizes, 6, "float32", dtype)
        shards = list(stage.out_dir.glob("*.safetensors"))
        written = sum(file.stat().st_size for file in shards)
        assert 0 <= written - rows * (states + 5) < 2000 * len(shards)  # names, offsets
        assert rows * states / 1e9 == stage.metric("capture/gigabytes")[0]
    run(tmp_path, tokens, target, feature_dtype="float8")
    assert f"{6 * 132} bytes a token" in capsys.readouterr().out


def test_the_error_of_each_layer_is_in_metrics_and_report_and_an_ordinary_target_is_not_warned_of(float8, plain):
    metrics, _ = float8.logged[-1]
    errors = {name.removeprefix("capture/float8_error_"): value for name, value in metrics.items() if "float8" in name}
    assert [f"layer_0{layer}" for layer in range(1, 6)] + ["final"] == list(errors)
    assert all(0.02 < error < 0.03 for error in errors.values())
    assert [] == float8.warnings
    section = next(section for section in report(float8.out_dir) if section.title == "float8")
    assert [f"layer {layer}" for layer in range(1, 6)] + ["the final norm"] == [name for name, _ in section.body.rows]
    assert [error for _, error in section.body.rows] == pytest.approx(list(errors.values()))
    info = read_json(float8.out_dir / "features.json")
    assert ("float8", "float32") == (info["feature_dtype"], info["dtype"])
    assert "feature_dtype" not in read_json(plain.out_dir / "features.json")
    assert not any("float8" in name for name in plain.logged[-1][0])
    assert "float8" not in [section.title for section in report(plain.out_dir)]


def test_a_target_with_one_massive_channel_is_warned_of_with_its_layers(tokens, target, tmp_path):
    changed = tmp_path / "target"
    shutil.copytree(target.path, changed)
    weights = load_file(changed / "model" / "model.safetensors")
    weights["model.language_model.layers.3.mlp.down_proj.weight"][7] *= 1e9
    save_file(weights, changed / "model" / "model.safetensors", {"format": "pt"})
    stage = run(tmp_path, tokens, TargetModel(changed, "changed"), feature_dtype="float8", final_hidden=False)
    (warning,) = stage.warnings
    assert warning.startswith("float8 features are too coarse for layer 3 (")
    assert "layer 5 (" in warning
    assert "layer 2 (" not in warning
    assert "leave feature_dtype of capture_targets out, or compare tau" in warning


def test_shards_that_are_not_float8_are_refused_where_features_json_says_so(plain, tmp_path):
    shutil.copytree(plain.out_dir, tmp_path / "features")
    info = read_json(tmp_path / "features" / "features.json")
    write_json(tmp_path / "features" / "features.json", info | {"feature_dtype": "float8"})
    message = "float32 features of width 640, but features.json says float8 features of width 640"
    with pytest.raises(DataError, match=message):
        FeatureReader(TargetFeatures(tmp_path / "features", "digest"), "val")
