"""Training: it learns, resumes to the same bytes, and refuses what does not fit."""

import json
import math
import multiprocessing
import os
import signal

import pytest
import torch
from draft_chain import make_features, make_inputs, make_plan, train_config
from fake_stage import FakeStage, folder_digest
from safetensors.torch import load_file

from dsl.errors import ConfigError, DataError, StopRequested
from ops.lib.data.files import read_json, read_jsonl
from ops.lib.drafts.backbone.step import Slots
from ops.lib.drafts.losses.slots import draw_anchors
from ops.lib.target.feature_shards import FeatureReader, write_feature_shard
from ops.lib.training.optimizer import learning_rate, make_optimizer
from ops.lib.training.rank_group import deal
from ops.train_dflash.batches import micro_batches
from ops.train_dflash.run import train_dflash
from ops.train_dflash.tally import count_slots, expected_tau, new_tally, slot_accuracy


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def train(folder, inputs, stop_after=None, **changes):
    stage = FakeStage(folder, inputs, stop_after=stop_after)
    train_dflash(train_config(**changes), stage)
    return stage


def test_a_draft_learns_a_task_that_the_anchor_decides(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learn")
    inputs = make_inputs(folder)
    inputs["batches"] = make_plan(folder / "long", inputs["features"], epochs=30, tokens_per_step=160)
    stage = train(folder / "train", inputs, lr=3e-2, eval_every=50, log_every=1)
    losses = stage.metric("train/loss")
    assert losses[0] > 5
    assert losses[-1] < 0.1
    assert stage.metric("val/accuracy")[-1] > 0.98
    assert stage.metric("val/expected_tau")[-1] > 3.9
    assert [step for metrics, step in stage.logged if "val/loss" in metrics] == [50, 100, len(losses)]


def test_what_is_logged_and_written(tmp_path, inputs):
    stage = train(tmp_path, inputs, log_every=4)
    total = read_json(inputs["batches"].path / "plan.json")["steps"]
    steps = [step for metrics, step in stage.logged if "train/loss" in metrics]
    assert steps == [*range(4, total, 4), total]
    assert set(stage.logged[0][0]) == {
        "train/loss",
        "train/accuracy",
        "train/expected_tau",
        "train/lr",
        "train/grad_norm",
        "train/anchors",
        "train/samples_without_anchor",
        "train/nonfinite_steps",
        "train/tokens_per_second",
        "train/anchors_per_second",
        "train/mfu",
        "train/wait_share",
        "train/memory_gigabytes",
        "train/accuracy_slot_01",
        "train/accuracy_slot_02",
        "train/accuracy_slot_03",
        "train/loss_slot_01",
        "train/loss_slot_02",
        "train/loss_slot_03",
    }
    assert stage.progressed[-1] == (total, total)
    assert sorted(stage.figures) == ["accuracy", "loss"]
    files = sorted(file.name for file in stage.out_dir.iterdir())
    assert files == ["config.json", "measurements.json", "model.safetensors", "training.json"]
    measured = read_json(stage.out_dir / "measurements.json")
    assert 0 < measured["step_seconds"] <= measured["seconds"]
    training = read_json(stage.out_dir / "training.json")
    assert training["steps"] == total
    assert training["target"] == inputs["target"].digest
    assert training["tokens"] == 2 * sum(FeatureReader(inputs["features"], "train").lengths)
    dtypes = {tensor.dtype for tensor in load_file(stage.out_dir / "model.safetensors").values()}
    assert dtypes == {torch.float32}


def test_anchors_are_drawn_anew_in_every_epoch_for_the_samples_of_the_plan(tmp_path, inputs, monkeypatch):
    drawn = []

    def spy(mask, num_anchors, *, seed, epoch, sample):
        drawn.append((seed, epoch, sample))
        return draw_anchors(mask, num_anchors, seed=seed, epoch=epoch, sample=sample)

    monkeypatch.setattr("ops.train_dflash.batches.draw_anchors", spy)
    train(tmp_path, inputs, seed=4)
    steps = read_jsonl(inputs["batches"].path / "steps.jsonl")
    planned = [(4, step["epoch"], sample) for step in steps for sample in step["samples"]]
    assert drawn == planned + [(0, -1, sample) for sample in range(4)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, inputs):
    return folder_digest(train(tmp_path_factory.mktemp("whole"), inputs, weight_decay=0.1).out_dir)


def test_log_and_checkpoint_intervals_do_not_change_the_result(tmp_path, inputs, uninterrupted):
    stage = train(tmp_path, inputs, weight_decay=0.1, log_every=1, checkpoint_every=2)
    assert folder_digest(stage.out_dir) == uninterrupted


def test_a_training_that_was_asked_to_stop_resumes_to_the_same_bytes(tmp_path, inputs, uninterrupted):
    with pytest.raises(StopRequested, match="after step 5 of"):
        train(tmp_path, inputs, stop_after=5, weight_decay=0.1)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["checkpoint-00000005"]
    stage = train(tmp_path, inputs, weight_decay=0.1)
    assert folder_digest(stage.out_dir) == uninterrupted
    assert stage.progressed[0][0] == 5


class DyingStage(FakeStage):
    """kill -9 of its own process behind step 8, while the checkpoint of step 6 may still be written."""

    def progress(self, done, total):
        if done == 8:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(folder, inputs, threads):
    torch.set_num_threads(threads)  # their number changes rounding
    train_dflash(train_config(weight_decay=0.1, checkpoint_every=3), DyingStage(folder, inputs))


def test_a_training_killed_by_kill_9_resumes_from_its_last_checkpoint_to_the_same_bytes(
    tmp_path, inputs, uninterrupted, capsys
):
    # The server imports torch once; it never computes, so forking it is safe.
    multiprocessing.set_forkserver_preload(["ops.train_dflash.run"])
    arguments = (tmp_path, inputs, torch.get_num_threads())
    killed = multiprocessing.get_context("forkserver").Process(target=train_until_killed, args=arguments)
    killed.start()
    killed.join(120)
    assert -signal.SIGKILL == killed.exitcode
    assert [] == list((tmp_path / "out").iterdir())
    unfinished = tmp_path / "work" / "checkpoint-00000009.tmp"
    unfinished.mkdir()
    (unfinished / "state.json").write_text("{")
    stage = train(tmp_path, inputs, weight_decay=0.1, checkpoint_every=3)
    assert stage.progressed[0][0] in (3, 6)
    step, total = stage.progressed[0]
    assert f"info: goes on from the checkpoint at step {step} of {total}\n" in capsys.readouterr().out
    assert folder_digest(stage.out_dir) == uninterrupted


def test_the_last_two_checkpoints_are_kept(tmp_path, inputs):
    train(tmp_path, inputs, checkpoint_every=2, max_steps=8)
    kept = sorted(path.name for path in (tmp_path / "work").iterdir())
    assert kept == ["checkpoint-00000004", "checkpoint-00000006"]


def test_a_checkpoint_of_another_config_is_refused_with_the_difference(tmp_path, inputs):
    with pytest.raises(StopRequested):
        train(tmp_path, inputs, stop_after=2)
    with pytest.raises(ConfigError, match=r"config\.lr: 0\.0006 then, 0\.1 now"):
        train(tmp_path, inputs, lr=0.1)
    train(tmp_path, inputs, micro_batch_tokens=64, log_every=2)


def test_micro_batches_change_the_result_by_rounding_only(tmp_path, inputs):
    whole = train(tmp_path / "whole", inputs)
    cut = train(tmp_path / "cut", inputs, micro_batch_tokens=24)
    for stage in (whole, cut):
        stage.weights = load_file(stage.out_dir / "model.safetensors")
    assert cut.metric("train/loss") == pytest.approx(whole.metric("train/loss"), rel=1e-5)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(cut.weights[name], weight, rtol=0, atol=2e-4)


def test_max_steps_ends_the_schedule_too(tmp_path, inputs):
    stage = train(tmp_path, inputs, max_steps=6, warmup_ratio=0.34, log_every=1)
    rates = [metrics["train/lr"] for metrics, _ in stage.logged if "train/lr" in metrics]
    expected = [0.5, 1.0] + [0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    assert rates == pytest.approx([6e-4 * share for share in expected])
    assert rates == [learning_rate(step, 6, 6e-4, 0.34) for step in range(6)]


def test_only_matrices_decay():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    groups = make_optimizer(model, 0.5).param_groups
    assert [(group["weight_decay"], [p.ndim for p in group["params"]]) for group in groups] == [
        (0.5, [2]),
        (0.0, [1, 1, 1]),
    ]


def spoiled_inputs(folder):
    """Eight samples, the fourth with features that are not finite."""
    inputs = make_inputs(folder, samples=8)
    reader = FeatureReader(inputs["features"], "train")
    features = [reader.features(index, 0, length) for index, length in enumerate(reader.lengths)]
    input_ids, loss_masks = zip(*map(reader.labels, range(len(reader))), strict=True)
    features[3][0] = float("nan")
    write_feature_shard(
        inputs["features"].path / "train-00000.safetensors",
        torch.cat(features),
        torch.cat(input_ids),
        torch.cat(loss_masks),
        torch.tensor([0, *reader.lengths]).cumsum(0),
    )
    return inputs


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path):
    inputs = spoiled_inputs(tmp_path / "inputs")
    stage = train(tmp_path / "train", inputs, log_every=1)
    steps = list(read_jsonl(inputs["batches"].path / "steps.jsonl"))
    spoiled = sum(3 in step["samples"] for step in steps)
    assert 0 < spoiled < len(steps)
    training = read_json(stage.out_dir / "training.json")
    (warning,) = stage.warnings
    assert warning.startswith(
        f"{spoiled} of {len(steps)} steps were skipped ({spoiled} with a loss or gradient that is"
    )
    assert (spoiled, spoiled) == (training["nonfinite_steps"], training["skipped_steps"])
    assert stage.metric("train/nonfinite_steps")[-1] == spoiled
    assert all(math.isfinite(loss) for loss in stage.metric("train/loss"))
    weights = load_file(stage.out_dir / "model.safetensors").values()
    assert all(bool(weight.isfinite().all()) for weight in weights)


def test_a_loss_that_is_not_finite_names_step_and_samples_and_keeps_the_checkpoint(tmp_path):
    inputs = spoiled_inputs(tmp_path / "inputs")
    with pytest.raises(DataError, match=r"step \d+: loss nan .* not finite; samples .*3.*checkpoint") as caught:
        train(tmp_path / "train", inputs, checkpoint_every=1, max_nonfinite=1)
    failed = int(str(caught.value).split(":")[0].removeprefix("step "))
    kept = sorted(path.name for path in (tmp_path / "train" / "work").iterdir())
    assert [int(name.split("-")[1]) for name in kept] == [step for step in (failed - 2, failed - 1) if step > 0]


def test_samples_without_an_anchor_are_skipped_and_counted(tmp_path):
    inputs = make_inputs(tmp_path / "inputs", samples=8, prompt=15)  # those of up to 15 tokens have no answer
    stage = train(tmp_path / "train", inputs, micro_batch_tokens=8)
    training = read_json(stage.out_dir / "training.json")
    lengths = FeatureReader(inputs["features"], "train").lengths
    assert training["samples_without_anchor"] == 2 * sum(length < 17 for length in lengths)


def test_a_set_without_any_anchor_trains_nothing_and_fails(tmp_path):
    inputs = make_inputs(tmp_path / "inputs", samples=4, prompt=40)
    with pytest.raises(DataError) as caught:
        train(tmp_path / "train", inputs)
    assert str(caught.value) == (
        "the weights are untrained: 2 of 2 steps were skipped (2 without a token to learn from); give every sample an "
        "answer to learn from (min_loss_tokens of tokenize_chat)"
    )
    assert not (tmp_path / "train" / "out" / "training.json").exists()


def test_a_training_of_which_every_step_is_not_finite_has_failed_though_few_follow_each_other(tmp_path):
    inputs = spoiled_inputs(tmp_path / "inputs")
    steps = list(read_jsonl(inputs["batches"].path / "steps.jsonl"))
    first = next(number for number, step in enumerate(steps) if 3 in step["samples"])
    (inputs["batches"].path / "steps.jsonl").write_text(json.dumps(steps[first] | {"step": 0}) + "\n")
    with pytest.raises(
        DataError, match=r"untrained: 1 of 1 steps were skipped \(1 with a loss or gradient that is not f"
    ):
        train(tmp_path / "train", inputs)


def test_without_a_val_split_nothing_is_measured_on_it(tmp_path):
    stage = train(tmp_path / "train", make_inputs(tmp_path / "inputs", val=0), eval_every=2)
    assert stage.metric("val/loss") == []
    assert read_json(stage.out_dir / "training.json")["val_metrics"] is None


def test_a_plan_of_other_features_is_refused(tmp_path, inputs):
    target = inputs["target"]
    fewer = make_features(tmp_path / "fewer", target, samples=5)
    with pytest.raises(DataError, match="deals 5 samples, and the features have 24"):
        train(tmp_path / "a", inputs | {"batches": make_plan(tmp_path / "plan", fewer)})
    altered = make_plan(tmp_path / "altered", inputs["features"])
    steps = altered.path / "steps.jsonl"
    steps.write_text(steps.read_text().replace('"tokens": ', '"tokens": 1', 1))
    with pytest.raises(DataError, match="made for other features: step 0 has 1"):
        train(tmp_path / "b", inputs | {"batches": altered})


def test_dealing_keeps_every_sample_and_evens_the_cost():
    costs = [8, 64, 16, 16, 32, 8]
    assert deal(costs, 2) == [[0, 1], [2, 3, 4, 5]]
    assert deal([32, 16], 3) == [[0], [1], []]
    assert deal(costs, 1) == [[0, 1, 2, 3, 4, 5]]


def test_micro_batches_put_similar_lengths_together_within_the_limit():
    assert list(micro_batches([8, 16, 16, 64, 32], 40)) == [[0, 1, 2], [4], [3]]
    assert list(micro_batches([], 40)) == []


def test_a_tally_gives_accuracy_by_slot_and_expected_tau():
    tally = new_tally(4, ())
    for slots, correct in (([1, 1, 2, 2], [True, True, True, False]), ([1, 1], [False, True])):
        losses_W = torch.zeros(len(slots))
        count_slots(tally, Slots(losses_W.sum(), torch.tensor(slots), torch.tensor(correct), losses_W))
    assert slot_accuracy(tally, ()) == [0.75, 0.5, 0.0]
    assert expected_tau(tally, ()) == 1 + 0.75 + 0.75 * 0.5
