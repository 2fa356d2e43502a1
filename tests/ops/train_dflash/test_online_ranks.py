"""Ranks that capture for others: the same draft, and no way for one side to wait for another that is gone."""

import json
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Pipe

import pytest
import torch
import torch.distributed as dist
from fake_stage import FakeStage, folder_digest
from import_graph import PYTHON_PATH, SUPPORT
from online_worker import SCENARIOS, VALUES
from run_ranks import run_ranks
from safetensors.torch import load_file

from dsl.errors import DataError, StopRequested
from dsl.op import Ref
from ops.artifacts import BatchPlan
from ops.lib.target.float8 import Float8States
from ops.shard_sequence.op import ShardSequence
from ops.shard_sequence.run import shard_sequence
from ops.train_dflash.batches import Rows
from ops.train_dflash.capture_ranks import CaptureRanks, answer, capture_ranks_of
from ops.train_dflash.online import RowStates
from ops.train_dflash.op import TrainDflash
from ops.train_dflash.run import train_dflash

HERE = SUPPORT / "training"
MACHINE = ("tokens_per_second", "anchors_per_second", "mfu", "wait_share", "memory_gigabytes", "time_share")
INFO = {"target_layer_ids": [0, 2], "hidden_size": 3, "final_hidden": True, "dtype": "bfloat16"}
LENGTHS = {"train": [5, 9, 4, 7], "val": [6]}


@pytest.fixture(scope="module")
def folder(tokens, target, tmp_path_factory):
    """The folder of all scenarios, and of "alone": one process that captures for itself."""
    folder = tmp_path_factory.mktemp("online_ranks")
    stage = FakeStage(folder / "plan", {"tokens": tokens})
    shard_sequence(ShardSequence(tokens=Ref("tokenize"), tokens_per_step=640, epochs=2, seed=0), stage)
    inputs = {"tokens": tokens, "target": target, "batches": stage.artifact(BatchPlan)}
    listed = {name: [str(artifact.path), artifact.digest] for name, artifact in inputs.items()}
    (folder / "inputs.json").write_text(json.dumps(listed))
    train_dflash(TrainDflash(**{name: Ref(name) for name in inputs}, **VALUES), FakeStage(folder / "alone", inputs))
    variables = os.environ | {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    run_ranks(4, [str(HERE / "online_worker.py"), str(folder)], folder, 400, variables)
    missing = [rank for rank in range(4) if not (folder / f"rank-{rank}.json").exists()]
    assert [] == missing, (folder / "log").read_text()[-5000:]
    return folder


@pytest.fixture(scope="module")
def seen(folder):
    """Scenario -> what each of its ranks saw."""
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]
    return {scenario.name: [ranks[rank][scenario.name] for rank in range(scenario.ranks)] for scenario in SCENARIOS}


def test_one_rank_that_captures_for_one_gives_the_bytes_of_one_process(folder, seen):
    assert ["", ""] == [rank["error"] for rank in seen["one"]]
    assert folder_digest(folder / "alone" / "out") == folder_digest(folder / "one" / "out")
    assert [] == seen["one"][1]["logged"]


def test_a_stop_reaches_the_ranks_that_capture_and_a_resume_gives_the_same_bytes(folder, seen):
    errors = [rank["error"] for rank in seen["stopped"]]
    assert errors[0] == "StopRequested: train_dflash stopped after step 3 of 8"
    assert errors[1] == "StopRequested: this rank captured for a training that stopped"
    assert 3 == seen["resumed"][0]["progressed"][0][0]
    assert folder_digest(folder / "alone" / "out") == folder_digest(folder / "resumed" / "out")


def test_a_stop_that_only_a_rank_that_captures_was_asked_for_stops_the_training(seen):
    errors = [rank["error"] for rank in seen["stopped by the rank that captures"]]
    assert errors[0].startswith("StopRequested: train_dflash stopped after step")
    assert errors[1].startswith("StopRequested")


@pytest.mark.parametrize("name", ["two", "shared sequences", "one row, three ranks that capture"])
def test_trainings_with_ranks_that_capture_equal_one_process(folder, seen, name):
    assert [""] * len(seen[name]) == [rank["error"] for rank in seen[name]]
    expected, got = (columns(rows) for rows in (alone_log(folder, seen), seen[name][0]["logged"]))
    assert expected.keys() == got.keys()
    for step, metrics in expected.items():
        assert metrics == pytest.approx(got[step], rel=2e-5, abs=2e-5)
    for weight, tensor in load_file(folder / "alone" / "out" / "model.safetensors").items():
        whole = load_file(folder / name / "out" / "model.safetensors")
        torch.testing.assert_close(whole[weight], tensor, rtol=0, atol=2e-3)


def alone_log(folder, seen):
    """That of "one", whose bytes are those of "alone"."""
    return seen["one"][0]["logged"]


def columns(log):
    steps: dict[int, dict[str, float]] = {}
    for metrics, step in log:
        kept = {name: value for name, value in metrics.items() if name.rpartition("/")[2] not in MACHINE}
        steps.setdefault(step, {}).update(kept)
    return steps


def test_rows_of_the_mesh_share_the_ranks_that_capture():
    assert [[0], [1], [0], [1]] == [capture_ranks_of(row, 4, 2) for row in range(4)]
    assert [[0, 2, 4], [1, 3]] == [capture_ranks_of(row, 2, 5) for row in range(2)]
    assert [[0], [0], [0]] == [capture_ranks_of(row, 3, 1) for row in range(3)]


def numbered(split, rows):
    """States that tell split, sample and token."""
    base = {"train": 0, "val": 1000}[split]
    features = [
        torch.arange(row.first, row.last).float()[:, None].expand(-1, 6) + base + 10 * row.index for row in rows
    ]
    hidden = [torch.full((LENGTHS[split][row.index], 3), float(row.index)) for row in rows]
    return RowStates(torch.cat(features).bfloat16(), torch.cat(hidden).bfloat16())


def joined_pair(servers=1, stop=None):
    ends = [Pipe() for _ in range(servers)]
    ranks = CaptureRanks([end[0] for end in ends], INFO, LENGTHS, stop or threading.Event())
    return ranks, [end[1] for end in ends]


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_rows_come_back_in_their_order_from_any_number_of_ranks(tmp_path, servers):
    ranks, ends = joined_pair(servers)
    rows = [Rows(3, 1, 4), Rows(0, 0, 5), Rows(1, 2, 2), Rows(2, 3, 4)]
    with ThreadPoolExecutor(servers) as pool:
        served = [pool.submit(answer, [end], numbered, FakeStage(tmp_path)) for end in ends]
        with ranks:
            for split, asked in (("train", rows), ("val", [Rows(0, 0, 6)]), ("train", rows[2:])):
                expected, got = numbered(split, asked), ranks.take(split, asked)
                assert torch.equal(expected.features, got.features)
                assert torch.equal(expected.final_hidden, got.final_hidden)
        assert [None] * servers == [one.result() for one in served]


@pytest.mark.parametrize("servers", [1, 2])
def test_float8_states_their_scales_and_errors_come_back_from_any_number_of_ranks(tmp_path, servers):
    def encoded(split, rows):
        states = numbered(split, rows)
        features, hidden = Float8States.encode(states.features, 2), Float8States.encode(states.final_hidden, 1)
        return RowStates(features, hidden, (0.5, 0.25, 0.125))

    ends = [Pipe() for _ in range(servers)]
    info = INFO | {"feature_dtype": "float8"}
    ranks = CaptureRanks([end[0] for end in ends], info, LENGTHS, threading.Event())
    rows = [Rows(3, 1, 4), Rows(0, 0, 5), Rows(1, 2, 2), Rows(2, 3, 4)]
    with ThreadPoolExecutor(servers) as pool:
        served = [pool.submit(answer, [end[1]], encoded, FakeStage(tmp_path)) for end in ends]
        with ranks:
            expected, got = encoded("train", rows), ranks.take("train", rows)
        assert [None] * servers == [one.result() for one in served]
    for one, other in ((expected.features, got.features), (expected.final_hidden, got.final_hidden)):
        assert torch.equal(one.values_TW.view(torch.uint8), other.values_TW.view(torch.uint8))
        assert torch.equal(one.scales_TL, other.scales_TL)
    assert expected.errors == got.errors


def test_a_rank_that_captures_answers_several_and_ends_with_the_last(tmp_path):
    pairs = [joined_pair() for _ in range(3)]
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(answer, [ends[0] for _, ends in pairs], numbered, FakeStage(tmp_path))
        for ranks, _ in pairs:
            with ranks:
                assert 3 == len(ranks.take("train", [Rows(0, 0, 3)]).features)
        assert served.result() is None


def test_an_error_of_a_training_rank_ends_the_rank_that_captures(tmp_path):
    ranks, ends = joined_pair()
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(answer, ends, numbered, FakeStage(tmp_path))
        with pytest.raises(KeyError), ranks:
            raise KeyError
        with pytest.raises(dist.DistNetworkError, match="the connection to a training rank broke"):
            served.result()


def test_an_error_of_a_rank_that_captures_ends_the_training_rank(tmp_path):
    def broken(split, rows):
        raise DataError("a shard is damaged")

    ranks, ends = joined_pair()
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(answer, ends, broken, FakeStage(tmp_path))
        with pytest.raises(dist.DistNetworkError, match="the connection to a capture rank broke"), ranks:
            ranks.take("train", [Rows(0, 0, 3)])
        with pytest.raises(DataError, match="a shard is damaged"):
            served.result()


def killed(split, rows):
    os.kill(os.getpid(), signal.SIGKILL)


def serve_until_killed(end, folder):
    answer([end], killed, FakeStage(folder))


def test_a_rank_that_captures_and_is_killed_ends_the_training_rank_at_once(tmp_path):
    ranks, ends = joined_pair()
    # The server imports torch once; it never computes, so forking it is safe.
    multiprocessing.set_forkserver_preload(["ops.train_dflash.run"])
    process = multiprocessing.get_context("forkserver").Process(target=serve_until_killed, args=(ends[0], tmp_path))
    process.start()
    ends[0].close()
    with pytest.raises(dist.DistNetworkError, match="broke"), ranks:
        ranks.take("train", [Rows(0, 0, 3)])
    process.join(60)
    assert -signal.SIGKILL == process.exitcode


def test_a_stop_is_told_in_both_directions(tmp_path):
    stop = threading.Event()
    ranks, ends = joined_pair(stop=stop)
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(answer, ends, numbered, FakeStage(tmp_path, stop_after=1))
        with pytest.raises(StopRequested), ranks:
            for expected in (False, True):
                ranks.take("train", [Rows(0, 0, 3)])
                assert expected == stop.is_set()
            raise StopRequested
        with pytest.raises(StopRequested, match="captured for a training that stopped"):
            served.result()
