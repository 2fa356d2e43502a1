"""What both backends of capture_targets share: ranks, memory, and the layers of each recipe."""

from __future__ import annotations

import importlib.metadata
import json
import threading
import time

import pytest
import torch
from fake_stage import FakeStage, folder_digest
from safetensors.torch import load_file

from dsl.errors import ConfigError, DataError, StopRequested
from dsl.op import Ref
from ops.capture_targets import run as capture_run
from ops.capture_targets.backend import Halving, HuggingFaceBackend
from ops.capture_targets.layers import eagle3_layers
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.lib.data.token_shards import TokenReader
from ops.lib.target.model import Target


def config(**changes):
    return CaptureTargets(tokens=Ref("tokenize"), target=Ref("target"), **{"shard_tokens": 1500, **changes})


def stage_of(folder, tokens, target, **options):
    return FakeStage(folder, {"tokens": tokens, "target": target}, **options)


def test_ranks_share_the_shards_out_and_end_with_the_bytes_of_one_process(tokens, target, features, tmp_path):
    first, second = (stage_of(tmp_path, tokens, target, rank=rank, world_size=2) for rank in (0, 1))
    waiting = threading.Thread(target=capture_targets, args=(config(), first))
    waiting.start()
    shards = json.loads((features.path / "features.json").read_text())["shards"]
    own = [shard["file"] for shard in shards[::2]]
    while waiting.is_alive() and not all((first.work_dir / file).exists() for file in own):
        time.sleep(0.05)
    assert waiting.is_alive()  # for the second rank's shards
    capture_targets(config(), second)
    waiting.join(timeout=60)
    assert not waiting.is_alive()
    assert folder_digest(features.path) == folder_digest(first.out_dir)
    assert len(shards) >= 3
    done, total = zip(*first.progressed, strict=True)
    assert done[-1] == total[-1] and sorted(done) == list(done)


def test_a_rank_makes_every_nth_shard_and_only_the_first_writes_the_artifact(tokens, target, tmp_path):
    second = stage_of(tmp_path, tokens, target, rank=1, world_size=2)
    capture_targets(config(splits=("train",)), second)
    made = sorted(file.name for file in second.work_dir.glob("*.safetensors"))
    assert made == [f"train-{number:05d}.safetensors" for number in range(1, 2 * len(made), 2)]
    assert list(second.out_dir.iterdir()) == []


def test_the_first_rank_stops_while_it_waits_for_others(tokens, target, tmp_path):
    first = stage_of(tmp_path, tokens, target, world_size=2, stop_after=10)
    with pytest.raises(StopRequested, match="other ranks had shards to make; finished shards are kept"):
        capture_targets(config(splits=("val",), shard_tokens=60), first)
    assert len(list(first.work_dir.glob("*.safetensors"))) >= 1


class SmallMemory(HuggingFaceBackend):
    """A backend on a device that holds the states of `limit` padded tokens."""

    limit = 10**9

    def forward(self, samples, layer_ids, *, final_hidden=False):
        padded = len(samples) * max(len(sample.input_ids) for sample in samples)
        self.asked = [*getattr(self, "asked", []), padded]
        if padded > self.limit:
            raise torch.OutOfMemoryError("no memory left")
        return super().forward(samples, layer_ids, final_hidden=final_hidden)


def test_out_of_memory_halves_the_batch_and_later_ones_and_changes_nothing_else(
    tokens, target, features, tmp_path, monkeypatch, capsys
):
    backend = SmallMemory(Target.load(target))
    backend.limit = 300
    monkeypatch.setattr(capture_run, "open_backend", lambda *_: backend)
    stage = stage_of(tmp_path, tokens, target)
    capture_targets(config(batch_tokens=1000), stage)
    failed = [padded for padded in backend.asked if padded > 300]
    assert 1 <= len(failed) <= 3  # halved once it was known, not tried again by every batch
    said = capsys.readouterr().out
    assert f"out of memory with {failed[0]:,} tokens; later batches have at most {failed[0] // 2:,}" in said
    difference = furthest(features, stage)
    print(f"after halving: {difference:.1e} from the undisturbed capture")
    assert difference <= 2e-5


def furthest(features, stage):
    """The largest difference between the stored states of two captures."""
    return max(
        float((load_file(file)["features"] - load_file(stage.out_dir / file.name)["features"]).abs().max())
        for file in features.path.glob("*.safetensors")
    )


def test_a_sample_that_does_not_fit_alone_is_named(tokens, target):
    backend = SmallMemory(Target.load(target))
    backend.limit = 0
    sample = TokenReader(tokens, "train").sample(3)
    with pytest.raises(DataError, match=rf"sample {sample.id}: its {len(sample.input_ids)} tokens do not fit"):
        Halving(backend).forward([sample], (1,))


def test_out_of_memory_on_a_rank_that_shares_a_model_is_an_error(tokens, target):
    backend = SmallMemory(Target.load(target))
    backend.limit = 0
    samples = [TokenReader(tokens, "train").sample(index) for index in (0, 1)]
    with pytest.raises(DataError, match="on a rank that shares the model with others: reduce batch_tokens"):
        Halving(backend, shares_model=True).forward(samples, (1,))


@pytest.mark.parametrize(("layers", "expected"), [(8, (1, 3, 4)), (36, (1, 17, 32)), (28, (1, 13, 24))])
def test_an_eagle3_draft_takes_an_early_a_middle_and_a_late_layer(layers, expected):
    assert expected == eagle3_layers(layers)
    # What SGLang keeps unless told otherwise, the inputs of layers 2, n // 2 and n - 3.
    assert (2, layers // 2, layers - 3) == tuple(layer_id + 1 for layer_id in expected)


def test_a_target_too_small_for_eagle3_is_refused():
    with pytest.raises(ConfigError, match=r"a target of 5 layers has no three distinct layers.*\[1, 1, 1\]"):
        eagle3_layers(5)


def test_the_recipe_chooses_the_layers_that_are_captured(tokens, target, tmp_path):
    stage = stage_of(tmp_path, tokens, target)
    capture_targets(config(recipe="eagle3", splits=("val",)), stage)
    assert [1, 3, 4] == json.loads((stage.out_dir / "features.json").read_text())["target_layer_ids"]
    assert (3, 5, 2) == tuple(
        made.layer_count
        for made in (config(recipe="eagle3"), config(), config(recipe="eagle3", target_layer_ids=(1, 2)))
    )


def test_a_missing_sglang_is_told_before_anything_is_loaded(tokens, target, tmp_path, monkeypatch):
    def not_found(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_found)
    with pytest.raises(
        DataError,
        match=r'backend = "sglang" of capture_targets needs SGLang 0.5.21 or 0.5.23, which is not.*\[sglang\]',
    ):
        capture_targets(config(backend="sglang"), stage_of(tmp_path, tokens, target))


def test_another_version_of_sglang_is_refused(tokens, target, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "0.5.22")
    with pytest.raises(
        DataError, match=r"written for SGLang 0.5.21 or 0.5.23.* and 0.5.22 is installed: pip install sglang==0.5.23"
    ):
        capture_targets(config(backend="sglang"), stage_of(tmp_path, tokens, target))
