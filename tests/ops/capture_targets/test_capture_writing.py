"""Shards are written while the next one is captured, and batches without padding keep what is captured."""

from __future__ import annotations

import shutil
import threading
import time

import pytest
import torch
from fake_stage import FakeStage
from full_disk import can_mount, mount, unmount
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn import functional

from dsl.errors import DataError
from dsl.files import is_full
from dsl.op import Ref
from ops.artifacts import TargetModel
from ops.capture_targets import run as capture_run
from ops.capture_targets.backend import HuggingFaceBackend, States
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_shard, capture_targets, plan_shards
from ops.capture_targets.writing import Shard
from ops.lib.data.background_writer import BackgroundWriter
from ops.lib.data.batching import batches_by_length
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.target.model import Target


def config(**changes):
    return CaptureTargets(tokens=Ref("tokenize"), target=Ref("target"), **{"shard_tokens": 1500, **changes})


def shard_of(value: float, tokens: int = 4) -> Shard:
    """A shard of one sample whose features all have this value."""
    shard = Shard([tokens], torch.float32, (3, 5))
    ids = torch.arange(tokens)
    mask = torch.ones(tokens, dtype=torch.bool)
    sample = TokenSample("s", "text", ids, mask, torch.empty(0, 0), torch.empty(0, 3, dtype=torch.int64), 1)
    shard.put(0, sample, States(torch.full((tokens, 2), value), None))
    return shard


def test_a_batch_that_fills_the_device_takes_only_samples_of_its_last_ones_length():
    lengths = [70, 30, 70, 31, 90, 70, 30, 71, 90]
    batches = [[lengths[index] for index in batch] for batch in batches_by_length(lengths, 200, 60)]
    assert [[30, 30], [31, 70], [70, 70], [71], [90, 90]] == batches
    assert batches_by_length(lengths, 200, 200) == batches_by_length(lengths, 200)
    assert [[30, 30, 31], [70, 70], [70, 71], [90, 90]] == [
        [lengths[index] for index in batch] for batch in batches_by_length(lengths, 200)
    ]


def test_batches_without_padding_hold_the_same_features_in_the_same_order(tokens, target, tmp_path, monkeypatch):
    reader, loaded = TokenReader(tokens, "train"), Target.load(target)
    plan, *_ = plan_shards("train", reader, 3000)
    lengths = [record["tokens"] for record in reader.records[plan.start : plan.end]]
    assert len(set(lengths)) > 5
    attend, masks = functional.scaled_dot_product_attention, []

    def watched(*given, attn_mask=None, **options):
        masks.append(attn_mask is not None)
        return attend(*given, attn_mask=attn_mask, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    found = {}
    for name, filled, is_masked in (("padded", None, True), ("unpadded", 1, False)):
        shard = Shard(lengths, torch.float32, (1, 2))
        masks.clear()
        capture_shard(shard, plan, HuggingFaceBackend(loaded), reader, (1, 2), config(), 1024, filled)
        shard.write(tmp_path / name)
        found[name] = load_file(tmp_path / name)
        assert is_masked == any(masks)  # only without a mask does a GPU take its fastest kernels
        assert masks
    features = {name: tensors.pop("features") for name, tensors in found.items()}
    torch.testing.assert_close(features["padded"], features["unpadded"], atol=2e-5, rtol=1e-4)
    assert all(torch.equal(found["padded"][name], found["unpadded"][name]) for name in found["padded"])


def test_a_shard_is_written_while_the_next_is_captured_and_only_one_waits(tmp_path, monkeypatch):
    writing, go_on = threading.Event(), threading.Event()
    write = Shard.write

    def slow(shard, path):
        writing.set()
        assert go_on.wait(60)
        write(shard, path)

    monkeypatch.setattr(Shard, "write", slow)
    with BackgroundWriter("shards") as writer:
        writer.start("a", shard_of(1.0).write, tmp_path / "a.safetensors")
        assert writing.wait(60)
        assert not (tmp_path / "a.safetensors").exists()  # and this thread goes on
        threading.Timer(0.2, go_on.set).start()
        writer.start("b", shard_of(2.0).write, tmp_path / "b.safetensors")
        assert go_on.is_set()  # so it has waited for the first one
        assert (tmp_path / "a.safetensors").exists()
    values = [load_file(tmp_path / f"{name}.safetensors")["features"][0, 0].item() for name in "ab"]
    assert [1.0, 2.0] == values
    assert {"a.safetensors", "b.safetensors"} == {file.name for file in tmp_path.iterdir()}


def test_a_capture_that_fails_keeps_the_shard_that_is_being_written(tokens, target, tmp_path, monkeypatch):
    stage = FakeStage(tmp_path, {"tokens": tokens, "target": target})
    capture, write, calls = capture_run.capture_shard, Shard.write, []

    def second_fails(*given):
        calls.append(given)
        if len(calls) == 2:
            raise DataError("no second shard")
        capture(*given)

    def slow(shard, path, worker):
        time.sleep(0.2)
        write(shard, path, worker)

    monkeypatch.setattr(capture_run, "capture_shard", second_fails)
    monkeypatch.setattr(Shard, "write", slow)
    with pytest.raises(DataError, match="no second shard"):
        capture_targets(config(), stage)
    assert ["train-00000.safetensors"] == [file.name for file in stage.work_dir.iterdir()]


def test_a_full_disk_under_the_thread_is_known_as_such(tmp_path):
    folder = tmp_path / "small"
    if not can_mount(folder):
        pytest.skip("this user may not mount a file system")
    mount(folder, "1m")
    try:
        raises = pytest.raises(SafetensorError, match="No space left on device")
        with raises as caught, BackgroundWriter("shards") as writer:
            writer.start("a", shard_of(1.0, tokens=1_000_000).write, folder / "a.safetensors")
        assert is_full(caught.value)
        assert not (folder / "a.safetensors").exists()
    finally:
        unmount(folder)


def test_a_shard_with_states_that_are_not_finite_is_not_written_and_names_sample_layer_dtype_and_remedy(tmp_path):
    ids, mask = torch.arange(3), torch.ones(3, dtype=torch.bool)
    empty = torch.empty(0, 0), torch.empty(0, 3, dtype=torch.int64)
    states = torch.ones(3, 4)
    states[1, 2:] = 70_000.0
    for dtype, final, message in (
        (
            torch.float16,
            None,
            "sample b: 2 of 12 captured values are not finite in float16, first in those of layer 5; float16 holds "
            'values up to 65,504: set dtype of capture_targets to "bfloat16" or "float32"',
        ),
        (
            torch.bfloat16,
            torch.full((3, 2), float("nan")),
            "sample a: 6 of 6 captured values are not finite in bfloat16, first in those of the final norm; the target "
            "computes them so: look for damaged weights, and at this sample, or set dtype of capture_targets to "
            '"float32"',
        ),
    ):
        shard = Shard([3, 3], dtype, (3, 5))
        for row, (name, features) in enumerate((("a", torch.ones(3, 4)), ("b", states))):
            shard.put(row, TokenSample(name, "text", ids, mask, *empty, 1), States(features, final))
        with pytest.raises(DataError) as caught:
            shard.write(tmp_path / "shard.safetensors")
        assert message == str(caught.value)
        assert [] == list(tmp_path.iterdir())


def test_a_capture_beyond_float16_fails_at_the_first_shard(tokens, target, tmp_path):
    large = tmp_path / "target"
    shutil.copytree(target.path, large)
    weights = load_file(large / "model" / "model.safetensors")
    weights["model.language_model.layers.3.mlp.down_proj.weight"] *= 1e9
    save_file(weights, large / "model" / "model.safetensors", {"format": "pt"})
    stage = FakeStage(tmp_path / "stage", {"tokens": tokens, "target": TargetModel(large, "changed")})
    with pytest.raises(DataError, match=r"values are not finite in float16, first in those of layer 3; .*\"bfloat16\""):
        capture_targets(config(dtype="float16"), stage)
    assert [] == list(stage.work_dir.glob("*.safetensors"))
    assert [] == list(stage.out_dir.iterdir())
