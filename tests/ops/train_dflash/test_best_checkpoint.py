"""Which checkpoints stay for the sake of the best one, and what is gone on from where one of them is damaged."""

import shutil

import pytest
from checkpoint_cases import IDENTITY, flip_a_bit, names, new_state, train

from dsl.errors import DataError
from ops.lib.data.files import read_json
from ops.lib.training.checkpoint import Best, Checkpoints, load_checkpoint, saved_weights


def test_the_last_and_the_best_are_kept(tmp_path):
    state = new_state()
    with Checkpoints(tmp_path, IDENTITY, rank=0, keep=2) as saving:
        for metric in (3.0, 1.0, None, float("nan"), 1.0, 2.0):
            train(state, 1)
            saving.save(state, metric)
    assert ["checkpoint-00000002", "checkpoint-00000005", "checkpoint-00000006"] == names(tmp_path)
    assert Best(2, 1.0) == state.best
    assert {"step": 2, "metric": 1.0} == read_json(tmp_path / "checkpoint-00000006" / "state.json")["best"]


def test_what_was_measured_and_the_best_step_survive_a_kill(tmp_path):
    state = new_state()
    with Checkpoints(tmp_path, IDENTITY, rank=0, keep=1) as saving:
        for metric in (2.0, 3.0, None):
            train(state, 1)
            state.measured.append({"step": state.step})
            saving.save(state, metric)
    resumed = new_state(seed=5)
    assert load_checkpoint(tmp_path, resumed, IDENTITY)
    assert [{"step": 1}, {"step": 2}, {"step": 3}] == resumed.measured
    assert Best(1, 2.0) == resumed.best
    with Checkpoints(tmp_path, IDENTITY, rank=0, keep=1) as saving:
        assert saving.load(resumed)
        for metric in (2.0, 1.0, 5.0):
            train(resumed, 1)
            saving.save(resumed, metric)
            saving.wait()
            best = 1 if metric == 2.0 else 5
            assert sorted({f"checkpoint-{best:08d}", f"checkpoint-{resumed.step:08d}"}) == names(tmp_path)


def test_a_checkpoint_whose_best_one_is_damaged_is_not_gone_on_from(tmp_path, capsys):
    state = new_state()
    with Checkpoints(tmp_path, IDENTITY, rank=0, keep=4) as saving:
        for metric in (2.0, 1.0, 3.0):
            train(state, 1)
            saving.save(state, metric)
    flip_a_bit(tmp_path / "checkpoint-00000002")
    resumed = new_state(seed=3)
    assert load_checkpoint(tmp_path, resumed, IDENTITY)
    assert 1 == resumed.step
    assert (
        "checkpoint-00000003.damaged: skipped a damaged checkpoint, checkpoint-00000002, the best before it, can no "
        "longer be read: state.safetensors was altered; trying checkpoint-00000002" in capsys.readouterr().out
    )


@pytest.fixture
def rising(tmp_path):
    """Two are kept, and a metric at every fourth of eight steps, each better: the newest is the new best."""
    state = new_state()
    with Checkpoints(tmp_path, IDENTITY, rank=0, keep=2) as saving:
        for step in range(1, 9):
            train(state, 1)
            saving.save(state, -step if step % 4 == 0 else None)
    return tmp_path


def test_the_best_of_the_one_before_stays_to_fall_back_on_when_a_new_best_is_damaged(rising, capsys):
    assert [f"checkpoint-0000000{step}" for step in (4, 7, 8)] == names(rising)
    flip_a_bit(rising / "checkpoint-00000008")
    resumed = new_state(seed=3)
    assert load_checkpoint(rising, resumed, IDENTITY)
    assert (7, Best(4, -4)) == (resumed.step, resumed.best)
    assert capsys.readouterr().out.endswith("state.safetensors was altered; trying checkpoint-00000007\n")


@pytest.mark.parametrize(
    "spoil, damage", [("bit", "state.safetensors was altered"), ("gone", "it is missing"), ("both", "it is missing")]
)
def test_a_whole_checkpoint_is_not_thrown_away_for_want_of_its_best_one(rising, spoil, damage):
    if spoil == "bit":
        flip_a_bit(rising / "checkpoint-00000004")
    else:
        shutil.rmtree(rising / "checkpoint-00000004")
    if spoil == "both":
        flip_a_bit(rising / "checkpoint-00000008")
    else:
        shutil.rmtree(rising / "checkpoint-00000008")
    before = names(rising)
    with pytest.raises(DataError) as caught:
        load_checkpoint(rising, new_state(), IDENTITY)
    assert str(caught.value) == (
        f"{rising}/checkpoint-00000007: the checkpoint is whole, but checkpoint-00000004, the best before it, "
        f"can no longer be read: {damage}; restore it, or remove the checkpoints to start again"
    )
    assert before == names(rising)


def test_altered_weights_of_the_selected_step_are_refused(rising):
    flip_a_bit(rising / "checkpoint-00000004")
    with pytest.raises(DataError, match="the weights of the selected step cannot be read: "):
        saved_weights(rising, new_state(), 4)
