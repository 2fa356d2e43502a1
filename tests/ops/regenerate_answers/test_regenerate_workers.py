"""Workers that share regenerating: the bytes of one process; a lost worker's journal is continued."""

from __future__ import annotations

import pytest
from chat_server import ChatServer, TinyModel
from fake_stage import FakeStage, folder_digest
from regenerate_cases import config, endpoint_config, run
from shard_workers import KILLED, run_workers

from dsl.errors import StopRequested
from ops.lib.data.files import read_json
from ops.regenerate_answers.endpoint import ServerUse
from ops.regenerate_answers.run import regenerate_answers

RUN = "ops.regenerate_answers.run:regenerate_answers"
GREEDY = {"max_new_tokens": 16, "finish_reasons": ("stop", "length"), "min_answer_tokens": 1, "shard_samples": 2}
POINTS = {
    "in the middle of a shard": ("ops.regenerate_answers.shards:Journal.add", 2),
    "between the end of a shard and its publication": ("ops.regenerate_answers.shards:publish", 2),
    "while it writes the artifact": ("ops.regenerate_answers.run:json_line", 3),
}


@pytest.fixture(scope="module")
def alone(parroted, talker, tmp_path_factory):
    return folder_digest(run(tmp_path_factory.mktemp("alone"), parroted, talker, **GREEDY).out_dir)


def test_the_bytes_of_workers_are_those_of_one_process(parroted, talker, alone, tmp_path):
    inputs = {"samples": parroted, "target": talker}
    assert [0, 0] == run_workers(RUN, config(**GREEDY), tmp_path, inputs, 2)
    assert alone == folder_digest(tmp_path / "out")
    assert not list((tmp_path / "work").glob("*.answers"))


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_workers_shards_and_artifact_are_made_by_the_other(parroted, talker, alone, tmp_path, point):
    inputs = {"samples": parroted, "target": talker}
    codes = run_workers(RUN, config(**GREEDY, batch_tokens=1), tmp_path, inputs, 2, {0: POINTS[point]})
    assert [KILLED, 0] == codes
    assert alone == folder_digest(tmp_path / "out")


def test_what_a_lost_worker_had_journalled_is_not_asked_again_and_the_figures_are_those_of_all(
    parroted, talker, tmp_path
):
    inputs = {"samples": parroted, "target": talker}
    with ChatServer(TinyModel(talker)) as server:
        served = endpoint_config(server, **GREEDY)
        whole = FakeStage(tmp_path / "whole", inputs)
        regenerate_answers(served, whole)
        asked = len(server.conversations)
        assert [0, 0] == run_workers(RUN, served, tmp_path / "two", inputs, 2)
        assert 2 * asked == len(server.conversations)
        measured = read_json(tmp_path / "two" / "out" / "measurements.json")
        # Each worker also lists the models, and asks the trivial question.
        assert asked + 2 * 2 == measured["requests"]
        killed = ("ops.regenerate_answers.shards:publish", 1)
        one_by_one = endpoint_config(server, **GREEDY | {"shard_samples": 9}, concurrency=1)
        assert [KILLED, 0] == run_workers(RUN, one_by_one, tmp_path / "killed", inputs, 2, {0: killed})
        assert 3 * asked == len(server.conversations)
    for name in ("two", "killed"):
        assert folder_digest(whole.out_dir) == folder_digest(tmp_path / name / "out")


def test_a_worker_that_waits_for_others_answers_honours_a_stop(parroted, talker, tmp_path):
    stage = FakeStage(tmp_path, {"samples": parroted, "target": talker}, workers=2, stop_after=0)
    for start in range(0, 8, 2):
        (stage.shared_dir / f"{start:08d}-{start + 2:08d}.jsonl.0").symlink_to("1")
    with pytest.raises(StopRequested, match="finished shards are kept"):
        regenerate_answers(config(**GREEDY), stage)


def test_figures_of_workers_are_summed_over_the_longest_time():
    workers = [
        ServerUse(requests=4, retries=1, answers=3, tokens=30, seconds=2.0, owner=None),
        ServerUse(requests=6, retries=0, answers=5, tokens=50, seconds=4.0, owner="sglang"),
    ]
    together = ServerUse.together(workers)
    assert ServerUse(requests=10, retries=1, answers=8, tokens=80, seconds=4.0, owner="sglang") == together
    assert {"requests": 10, "retries": 1, "requests_per_second": 2.5, "tokens_per_second": 20.0} == together.figures()
