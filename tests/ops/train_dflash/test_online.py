"""Capture while training: the curve, the draft and the bytes after a kill are those of stored features."""

import multiprocessing
import os
import shutil
import signal
import time

import pytest
import torch
from fake_stage import FakeStage, folder_digest
from online_cases import ONLINE
from safetensors.torch import load_file, save_file

from dsl.errors import ConfigError, DataError, StopRequested
from dsl.op import Ref
from ops.artifacts import BatchPlan, DraftCheckpoint, TargetFeatures, TargetModel, TokenShards
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets
from ops.export_draft.op import ExportDraft
from ops.export_draft.run import export_draft
from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.backbone.config import from_serving
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.lilicorr.config import LilicorrOptions
from ops.lib.target.feature_shards import FeatureReader
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.train_dflash.batches import Place, Rows, needed
from ops.train_dflash.engine import set_up
from ops.train_dflash.inputs import open_inputs
from ops.train_dflash.online import Capture, OnlineReader, OnlineSource, describe_features
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.prefetch import Prefetch
from ops.train_dflash.run import train_dflash

CPU = torch.device("cpu")
SHAPE = {"block_size": 8, "num_layers": 1, "num_anchors": 8, "seed": 0}
STEPS = 50


def plan_of(folder, **source):
    stage = FakeStage(folder, source)
    references = {name: Ref(name) for name in source}
    shard_sequence(ShardSequence(**references, tokens_per_step=640, epochs=6, seed=0), stage)
    return stage.artifact(BatchPlan)


@pytest.fixture(scope="module")
def plan(tokens, tmp_path_factory):
    return plan_of(tmp_path_factory.mktemp("plan"), tokens=tokens)


@pytest.fixture(scope="module")
def online(tokens, target, plan):
    return {"tokens": tokens, "target": target, "batches": plan}


@pytest.fixture(scope="module")
def stored(features, target, plan):
    return {"features": features, "target": target, "batches": plan}


def train(folder, inputs, stop_after=None, stage_type=FakeStage, **changes):
    stage = stage_type(folder, inputs, stop_after=stop_after)
    train_dflash(config_of(inputs, **changes), stage)
    return stage


class Counted:
    """Captures, and counts the samples."""

    def __init__(self, inputs, info):
        self.samples = 0
        self._capture = Capture(inputs["tokens"], inputs["target"], info, CPU, batch_tokens=4096)

    def ask(self, split, rows):
        def take():
            self.samples += len(rows)
            return self._capture.take(split, rows)

        return take


def config_of(inputs, **changes):
    capture = {} if "features" in inputs else {"capture": "online"}
    return TrainDflash(**{name: Ref(name) for name in inputs}, **SHAPE | capture | changes)


@pytest.fixture(scope="module")
def offline_run(stored, tmp_path_factory):
    return train(tmp_path_factory.mktemp("offline"), stored, max_steps=STEPS, log_every=1, eval_every=20, lr=3e-3)


@pytest.fixture(scope="module")
def online_run(online, tmp_path_factory):
    return train(
        tmp_path_factory.mktemp("online"), online, max_steps=STEPS, log_every=1, eval_every=20, eval_prompts=0, lr=3e-3,
        capture_batch_tokens=300,
    )  # fmt: skip


def test_the_plan_of_tokens_is_the_plan_of_their_features(tmp_path, tokens, features, plan):
    assert folder_digest(plan_of(tmp_path, features=features).path) == plan.digest


def test_online_and_stored_features_give_the_same_curve(offline_run, online_run):
    """Within 1e-4 relative over the first 50 steps in float32; on the val split too."""
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        expected, got = offline_run.metric(name), online_run.metric(name)
        differences = [abs(a / b - 1) for a, b in zip(got, expected, strict=True)]
        print(f"\n{name}: largest relative difference {max(differences):.1e} over {len(expected)} values")
        assert max(differences) <= 1e-4
    assert STEPS == len(offline_run.metric("train/loss"))
    assert offline_run.metric("train/loss")[-1] < offline_run.metric("train/loss")[0] - 0.4
    for name, weight in load_file(offline_run.out_dir / "model.safetensors").items():
        torch.testing.assert_close(load_file(online_run.out_dir / "model.safetensors")[name], weight, rtol=0, atol=1e-3)


def test_features_of_other_layers_show_in_the_curve(offline_run, online, tmp_path):
    layers = tuple(read_json(offline_run.out_dir / "training.json")["captured"]["target_layer_ids"])
    other = (layers[0] - 1, *layers[1:])
    got = train(tmp_path, online, max_steps=3, log_every=1, target_layer_ids=other).metric("train/loss")[0]
    assert abs(got / offline_run.metric("train/loss")[0] - 1) > 1e-4


def test_nothing_is_stored_and_the_bytes_that_are_not_are_told(tokens, features, online, tmp_path, capsys):
    stage = train(tmp_path, online, max_steps=1)
    files = {file.name: file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()}
    written = sum(
        (features.path / shard["file"]).stat().st_size for shard in read_json(features.path / "features.json")["shards"]
    )
    told = next(line for line in capsys.readouterr().out.splitlines() if "not stored" in line)
    rows = sum(sum(FeatureReader(features, split).lengths) for split in ("train", "val"))
    size = rows * FeatureReader(features, "train").width * 4
    assert (
        f"info: online: {size / 1e9:.2f} GB of features are captured on the fly by the training ranks and not stored"
        == told
    )
    assert sum(files.values()) < written
    assert ["config.json", "measurements.json", "model.safetensors", "training.json"] == sorted(
        file.name for file in stage.out_dir.iterdir()
    )


def test_the_draft_knows_what_it_was_trained_on_and_is_exported_alike(
    offline_run, online_run, features, target, tmp_path
):
    info = read_json(features.path / "features.json")
    info.pop("shards")
    for run in (offline_run, online_run):
        assert info == read_json(run.out_dir / "training.json")["captured"]
    configs = []
    for name, run in (("offline", offline_run), ("online", online_run)):
        stage = FakeStage(tmp_path / name, {"draft": run.artifact(DraftCheckpoint), "target": target})
        export_draft(ExportDraft(draft=Ref("train"), target=Ref("target")), stage)
        config = read_json(stage.out_dir / "config.json")
        weights = config["dflow"]["digest"].pop("tensors")  # they differ by rounding
        assert 64 == len(weights)
        configs.append(config)
    assert configs[0] == configs[1]


@pytest.fixture(scope="module")
def stored_final(tokens, target, plan, tmp_path_factory):
    stage = FakeStage(tmp_path_factory.mktemp("final"), {"tokens": tokens, "target": target})
    capture_targets(CaptureTargets(tokens=Ref("tokenize"), target=Ref("target"), final_hidden=True), stage)
    return {"features": stage.artifact(TargetFeatures), "target": target, "batches": plan}


def test_the_target_behind_its_final_norm_is_captured_for_the_divergence(stored_final, online, tmp_path):
    options = {"max_steps": 4, "log_every": 1, "loss": "kl", "num_anchors": 4}
    losses = [
        train(tmp_path / name, inputs, **options).metric("train/loss")
        for name, inputs in (("a", stored_final), ("b", online))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_lilicorr_is_trained_online_as_from_stored_features(stored_final, online, tmp_path):
    """Its terms read the target's final states, the end of each block's context, and the target's embedding."""
    own = LilicorrOptions(candidates=16, width=16, heads=2, factors=8, hinge=0.1, conv=True)
    options = {"max_steps": 5, "log_every": 1, "num_anchors": 4, "algorithm": "lilicorr", "lilicorr": own, "lr": 3e-3}
    runs = [train(tmp_path / name, inputs, **options) for name, inputs in (("a", stored_final), ("b", online))]
    for name in ("loss", "grad_norm", "accuracy", "candidate_recall", "prefix_recall"):
        stored, captured = (run.metric(f"train/{name}") for run in runs)
        assert captured == pytest.approx(stored, rel=1e-4), name
        assert 5 == len(stored) and max(stored) > 0
    stored, captured = (load_file(run.out_dir / "model.safetensors") for run in runs)
    fresh = DraftModel(from_serving(read_json(runs[0].out_dir / "config.json")))
    fresh.initialise(SHAPE["seed"])
    for name, weight in stored.items():
        torch.testing.assert_close(captured[name], weight, rtol=0, atol=1e-3)
        if name.startswith("lilicorr.") and weight.ndim == 2:
            assert (weight - fresh.state_dict()[name]).abs().max() > 1e-4, name


RESUMED = {  # LiLiCorr, which also takes the target's final states and the ends of contexts from the capture
    "max_steps": 9,
    "num_anchors": 4,
    "algorithm": "lilicorr",
    "lilicorr": LilicorrOptions(candidates=4, width=16, heads=2, factors=8, conv=True),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, online):
    return folder_digest(train(tmp_path_factory.mktemp("whole"), online, **RESUMED).out_dir)


def test_an_online_training_that_was_asked_to_stop_resumes_to_the_same_bytes(tmp_path, online, uninterrupted):
    with pytest.raises(StopRequested, match="after step 4 of 9"):
        train(tmp_path, online, stop_after=4, **RESUMED)
    stage = train(tmp_path, online, **RESUMED)
    assert 4 == stage.progressed[0][0]
    assert folder_digest(stage.out_dir) == uninterrupted


class DyingStage(FakeStage):
    """kill -9 of its own process behind step 6, with micro-batches in the buffer."""

    def progress(self, done, total):
        if done == 6:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(folder, inputs):
    torch.set_num_threads(1)
    train(folder, inputs, stage_type=DyingStage, **RESUMED, checkpoint_every=2, buffer_batches=4)


def test_an_online_training_killed_by_kill_9_loses_nothing_but_its_buffer(tmp_path, online, uninterrupted):
    # The server imports torch once; it never computes, so forking it is safe.
    multiprocessing.set_forkserver_preload(["ops.train_dflash.run"])
    killed = multiprocessing.get_context("forkserver").Process(target=train_until_killed, args=(tmp_path, online))
    killed.start()
    killed.join(120)
    assert -signal.SIGKILL == killed.exitcode
    stage = train(tmp_path, online, **RESUMED, checkpoint_every=2)
    assert stage.progressed[0][0] in (2, 4)
    assert folder_digest(stage.out_dir) == uninterrupted


def test_a_checkpoint_of_other_layers_is_refused(tmp_path, online):
    with pytest.raises(StopRequested):
        train(tmp_path, online, stop_after=1, max_steps=9)
    with pytest.raises(ConfigError, match=r"captured\.target_layer_ids"):
        train(tmp_path, online, max_steps=9, capture_layers=4)


@pytest.mark.parametrize("buffer_batches", [1, 3])
def test_no_more_than_the_buffer_is_captured_ahead_of_the_training(online, tmp_path, buffer_batches):
    config = config_of(online, micro_batch_tokens=128, buffer_batches=buffer_batches)
    stage = FakeStage(tmp_path, online)
    inputs = open_inputs(config, stage)
    capture = Counted(online, inputs.captured)
    stream = set_up(config, stage, inputs, capture.ask).train
    sizes = [len(batch) for step in inputs.steps[:6] for batch in stream.batches(stream.drawn(step, 0), 0)]
    with Prefetch(stream.steps(inputs.steps[:6], 0), config.buffer_batches) as prepared:
        for taken in range(4):
            ahead = sum(sizes[: taken + buffer_batches + 1])
            deadline = time.monotonic() + 120
            while capture.samples < ahead and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.1)
            assert ahead == capture.samples
            next(prepared)


@pytest.mark.parametrize("buffer_batches", [1, 4])
def test_no_more_than_the_buffer_is_requested_of_a_pool_ahead_of_the_training(online, tmp_path, buffer_batches):
    config = config_of(online, micro_batch_tokens=128, buffer_batches=buffer_batches)
    stage = FakeStage(tmp_path, online)
    inputs = open_inputs(config, stage)
    capture = Counted(online, inputs.captured)
    asked = []

    def ask(split, rows):
        asked.append(rows)
        return capture.ask(split, rows)

    stream = set_up(config, stage, inputs, ask, ahead=buffer_batches - 1).train
    with Prefetch(stream.steps(inputs.steps[:6], 0), stream.ready(buffer_batches)) as prepared:
        for taken in range(4):
            deadline = time.monotonic() + 120
            while len(asked) < taken + buffer_batches + 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.1)
            assert taken + buffer_batches + 1 == len(asked)
            next(prepared)


def test_a_sequence_parallel_rank_runs_the_samples_that_its_slice_touches(online, features, tmp_path):
    config = config_of(online)
    stage = FakeStage(tmp_path, online)
    inputs = open_inputs(config, stage)
    capture = Counted(online, inputs.captured)
    stream = set_up(config, stage, inputs, capture.ask).train
    drawn = [one for one in stream.drawn(inputs.steps[0], 0) if len(one.anchors_A)]
    source, reader = OnlineSource(capture.ask, inputs.train, "train"), FeatureReader(features, "train")
    total = 0
    for rank in range(4):
        place = Place(dp_rank=0, dp_size=1, sp_rank=rank, sp_degree=4, device=CPU, dtype=torch.float32)
        rows = needed(drawn, place)
        states = source.ask(rows)()
        for row in rows:
            if row.first < row.last:
                expected = reader.features(row.index, row.first, row.last)
                torch.testing.assert_close(
                    states.features(row.index, row.first, row.last), expected, rtol=1e-4, atol=1e-4
                )
                total += row.last - row.first
    assert sum(one.prefix for one in drawn) == total
    assert len(drawn) <= capture.samples <= len(drawn) + 3


def test_layers_that_the_target_does_not_have_are_named_by_the_field(online, tmp_path):
    with pytest.raises(ConfigError, match="capture_layers = 40: a target of"):
        train(tmp_path, online, capture_layers=40)
    with pytest.raises(ConfigError, match="target_layer_ids: 40 is out of range"):
        train(tmp_path, online, target_layer_ids=(1, 40))


def test_tokens_that_the_target_cannot_read_are_refused(online, tmp_path):
    for name in ("samples.jsonl", "tokens.json"):
        (tmp_path / name).write_bytes((online["tokens"].path / name).read_bytes())
    write_json(tmp_path / "tokens.json", read_json(tmp_path / "tokens.json") | {"eos_token_ids": [7]})
    other = online | {"tokens": TokenShards(path=tmp_path, digest="o" * 64)}
    with pytest.raises(DataError, match="do not fit the target: their EOS ids are"):
        open_inputs(config_of(other), FakeStage(tmp_path / "stage", other))


def test_labels_of_tokens_are_those_of_features(tokens, target, features):
    config = TrainDflash(**ONLINE)
    info = describe_features(config, tokens, target)
    for split in ("train", "val"):
        reader, captured = OnlineReader(tokens, split, info), FeatureReader(features, split)
        assert (captured.lengths, captured.width, len(captured)) == (reader.lengths, reader.width, len(reader))
        for index in range(len(reader)):
            for expected, got in zip(captured.labels(index), reader.labels(index), strict=True):
                assert expected.dtype == got.dtype
                assert torch.equal(expected, got)


def test_rows_out_of_the_middle_of_samples_are_those_of_the_features(tokens, target, features):
    info = describe_features(TrainDflash(**ONLINE), tokens, target)
    capture = Capture(tokens, target, info, CPU, 256)
    rows = [Rows(5, 3, 9), Rows(0, 0, 1), Rows(40, 7, 20)]
    reader = FeatureReader(features, "train")
    expected = torch.cat([reader.features(row.index, row.first, row.last) for row in rows])
    torch.testing.assert_close(capture.take("train", rows).features, expected, rtol=1e-4, atol=1e-4)


def test_states_beyond_float16_end_a_training_that_captures_them_before_its_first_step(online, target, tmp_path):
    large = tmp_path / "target"
    shutil.copytree(target.path, large)
    weights = load_file(large / "model" / "model.safetensors")
    weights["model.language_model.layers.3.mlp.down_proj.weight"] *= 1e9
    save_file(weights, large / "model" / "model.safetensors", {"format": "pt"})
    inputs = online | {"target": TargetModel(large, "changed")}
    with pytest.raises(DataError) as caught:
        train(tmp_path / "train", inputs, capture_dtype="float16", max_steps=2)
    assert "values are not finite in float16, first in those of layer" in str(caught.value)
    assert 'set capture_dtype of train_dflash to "bfloat16" or "float32"' in str(caught.value)
    assert [] == list((tmp_path / "train" / "out").iterdir())
