"""A training whose features a pool captures: the bytes of one that captures for itself, whatever happens to workers."""

import os

import attrs
import pytest
import torch
from fake_stage import FakeStage, folder_digest
from import_graph import PYTHON_PATH, SUPPORT
from pool_cases import How, workers_of
from pool_trainings import config_of, write_inputs
from run_ranks import run_ranks

from dsl.errors import ConfigError, StopRequested
from dsl.op import Ref
from ops.artifacts import BatchPlan
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.train_dflash import hardware
from ops.train_dflash.run import train_dflash

METRICS = ("stream/workers", "stream/gigabytes_per_second", "stream/asked_again")
WORK = ("capture/tokens_per_second", "capture/busy_share", "capture/blocked_share")


@pytest.fixture(scope="module")
def inputs(tokens, target, tmp_path_factory):
    stage = FakeStage(tmp_path_factory.mktemp("plan"), {"tokens": tokens})
    shard_sequence(ShardSequence(tokens=Ref("tokenize"), tokens_per_step=640, epochs=2, seed=0), stage)
    return {"tokens": tokens, "target": target, "batches": stage.artifact(BatchPlan)}


@pytest.fixture(scope="module", autouse=True)
def quick():
    threads, size = torch.get_num_threads(), hardware.SIZES["cpu"]
    torch.set_num_threads(1)
    hardware.SIZES["cpu"] = 64  # the peak is of no interest here, and its measurement takes a second
    yield
    torch.set_num_threads(threads)
    hardware.SIZES["cpu"] = size


class StopsAfter(FakeStage):
    """A stage that is asked to stop after this many steps."""

    def stop_requested(self):
        return self.stop_after is not None and bool(self.progressed) and self.progressed[-1][0] >= self.stop_after


def train(folder, inputs, workers=None, stop_after=None, **changes):
    pool = None if workers is None else workers.place
    stage = StopsAfter(folder, inputs, pool=pool, stop_after=stop_after)
    train_dflash(config_of(inputs, **changes), stage)
    return stage


@pytest.fixture(scope="module")
def alone(inputs, tmp_path_factory):
    """The draft of one process that captures for itself, by its loss."""
    folder = tmp_path_factory.mktemp("alone")
    return {loss: folder_digest(train(folder / loss, inputs, loss=loss).out_dir) for loss in ("dflash", "kl")}


@pytest.mark.parametrize("loss", ["dflash", "kl"])
def test_a_draft_is_the_same_bytes_without_a_pool_and_with_workers_of_which_two_are_killed(
    inputs, alone, tmp_path, loss, capsys
):
    training = (config_of(inputs, loss=loss), inputs)
    hows = (How(training=training, dies_in=3), How(training=training, tears=4), How(training=training, after=2))
    with workers_of(tmp_path / "pool", *hows) as workers:
        workers.wait_for(3)
        # Enough is requested ahead for both to be killed while the third one holds its units.
        stage = train(tmp_path / "rank", inputs, workers, loss=loss, buffer_batches=50)
    assert alone[loss] == folder_digest(stage.out_dir)
    logged = {name: stage.metric(name) for name in (*METRICS, *WORK)}
    assert {8} == {len(values) for values in logged.values()}
    assert logged["stream/asked_again"][-1] >= 2
    assert logged["stream/workers"][-1] == 1
    assert all(0 <= share <= 1 for name in WORK[1:] for share in logged[name])
    assert max(logged["capture/tokens_per_second"]) > 0
    assert " would keep up" in capsys.readouterr().out


def test_a_stopped_training_goes_on_with_another_number_of_workers_or_with_none(inputs, alone, tmp_path):
    training = (config_of(inputs), inputs)
    for number, step in ((1, 3), (2, 6)):
        stopped = pytest.raises(StopRequested, match=f"after step {step} of 8")
        with workers_of(tmp_path / str(number), *[How(training=training)] * number) as workers, stopped:
            train(tmp_path / "rank", inputs, workers, stop_after=step)
    assert alone["dflash"] == folder_digest(train(tmp_path / "rank", inputs).out_dir)


def test_a_worker_with_another_batch_size_is_refused(inputs, tmp_path):
    other = (config_of(inputs, capture_batch_tokens=100), inputs)
    refused = pytest.raises(ConfigError, match="capture_batch_tokens: 100 there, 8192 here")
    with workers_of(tmp_path / "pool", How(training=other)) as workers, refused:
        train(tmp_path / "rank", inputs, workers)


def test_two_ranks_that_share_every_sequence_give_the_same_bytes_with_and_without_a_pool(inputs, tmp_path):
    write_inputs(tmp_path, inputs)
    plain, taught = (How(training=(config_of(inputs, loss=loss), inputs)) for loss in ("dflash", "kl"))
    variables = os.environ | {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    with workers_of(tmp_path / "sp pool", plain, plain), workers_of(tmp_path / "sp teacher pool", taught, taught):
        run_ranks(2, [str(SUPPORT / "training" / "pool_rank.py"), str(tmp_path)], tmp_path, 400, variables)
    for name in ("sp", "sp teacher"):
        expected = folder_digest(tmp_path / f"{name} alone" / "out")
        assert expected == folder_digest(tmp_path / f"{name} pool" / "out"), (tmp_path / "log").read_text()[-3000:]
        assert (tmp_path / f"{name} pool" / "out" / "model.safetensors").exists()


def test_more_workers_than_requested_micro_batches_are_warned_of(inputs, tmp_path):
    with workers_of(tmp_path / "pool") as workers:
        stage = FakeStage(tmp_path / "rank", inputs, pool=attrs.evolve(workers.place, workers=9), stop_after=0)
        with pytest.raises(StopRequested):
            train_dflash(config_of(inputs), stage)
    assert "buffer_batches = 2 keeps at most 2 of 9 pool workers busy: set it to 18" in stage.warnings[0]
