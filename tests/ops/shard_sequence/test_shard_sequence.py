"""The plan of batches."""

from itertools import pairwise

import pytest
from draft_chain import make_features, make_target
from fake_stage import FakeStage, folder_digest
from hypothesis import given
from hypothesis import strategies as st

from dsl.errors import DataError
from dsl.op import Ref
from ops.lib.data.files import read_json, read_jsonl
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.shard_sequence.steps import plan_steps


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    pad_multiple=st.sampled_from([1, 4, 8]),
    room=st.integers(40, 120),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_every_epoch_takes_every_sample_once_in_steps_that_fit(lengths, pad_multiple, room, epochs, seed):
    steps = list(plan_steps(lengths, room, pad_multiple, epochs, seed))
    assert [step.step for step in steps] == list(range(len(steps)))
    assert [step.epoch for step in steps] == sorted(step.epoch for step in steps)
    for epoch in range(epochs):
        taken = [sample for step in steps if step.epoch == epoch for sample in step.samples]
        assert sorted(taken) == list(range(len(lengths)))
    for step in steps:
        padded = [(lengths[sample] + pad_multiple - 1) // pad_multiple * pad_multiple for sample in step.samples]
        assert step.tokens == sum(padded) <= room
        assert step.samples


@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=60), seed=st.integers(0, 9))
def test_a_step_is_closed_only_when_the_next_sample_does_not_fit(lengths, seed):
    steps = list(plan_steps(lengths, 64, 1, 1, seed))
    for step, following in pairwise(steps):
        assert step.tokens + lengths[following.samples[0]] > 64


def order(lengths, seed, epochs=1, room=1000):
    return [sample for step in plan_steps(lengths, room, 8, epochs, seed) for sample in step.samples]


def test_the_order_depends_on_seed_and_epoch_alone():
    twice = order([9] * 50, seed=0, epochs=2)
    assert twice[:50] != twice[50:]
    assert order([9] * 50, seed=1) != order([9] * 50, seed=0)
    assert order(list(range(1, 51)), seed=0, room=60) == order([9] * 50, seed=0)
    assert order([9] * 8, seed=0) == [4, 2, 6, 0, 7, 5, 1, 3]


def test_the_plan_is_written_in_the_documented_layout(tmp_path, capsys):
    features = make_features(tmp_path / "features", make_target(tmp_path / "target"), samples=5, val=1)
    digests = []
    for attempt in ("a", "b"):
        stage = FakeStage(tmp_path / attempt, {"features": features})
        config = ShardSequence(features=Ref("capture"), tokens_per_step=48, epochs=2, seed=3)
        shard_sequence(config, stage)
        digests.append(folder_digest(stage.out_dir))
    steps = list(read_jsonl(stage.out_dir / "steps.jsonl"))
    assert read_json(stage.out_dir / "plan.json") == {
        "format": 1,
        "steps": len(steps),
        "epochs": 2,
        "samples": 5,
        "tokens_per_step": 48,
        "pad_multiple": 8,
        "seed": 3,
        "split": "train",
    }
    assert [sorted(step) for step in steps] == [["epoch", "samples", "step", "tokens"]] * len(steps)
    assert digests[0] == digests[1]
    assert "info: reading the lengths of all samples, and planning the steps of 2 epochs" in capsys.readouterr().out


def test_a_sample_longer_than_a_step_is_named():
    with pytest.raises(
        DataError, match=r"sample 1 of the split train has 33 tokens, 40 when padded: more than .* = 32"
    ):
        list(plan_steps([8, 33], 32, 8, 1, 0))


def test_a_split_without_samples_is_refused(tmp_path):
    empty = make_features(tmp_path / "features", make_target(tmp_path / "target"), samples=0)
    stage = FakeStage(tmp_path / "stage", {"features": empty})
    with pytest.raises(DataError, match="the split train has no samples; there is nothing to train on"):
        shard_sequence(ShardSequence(features=Ref("capture")), stage)
