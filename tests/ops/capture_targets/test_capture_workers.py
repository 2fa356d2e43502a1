"""Workers that share a capture: the bytes of one process, whoever is killed and whenever."""

from __future__ import annotations

from itertools import product

import pytest
from fake_stage import FakeStage, folder_digest
from shard_workers import KILLED, run_workers

from dsl.errors import StopRequested
from dsl.op import Ref
from ops.capture_targets import run as capture_run
from ops.capture_targets.op import CaptureTargets
from ops.capture_targets.run import capture_targets

RUN = "ops.capture_targets.run:capture_targets"
CONFIG = CaptureTargets(tokens=Ref("tokenize"), target=Ref("target"), shard_tokens=1500)
POINTS = {
    "in the middle of a shard": ("ops.capture_targets.backend:HuggingFaceBackend.forward", 4),
    "between its claim and its first pass": ("ops.capture_targets.run:capture_shard", 2),
    "between the end of a shard and its publication": ("ops.capture_targets.writing:publish", 1),
    "while it writes the artifact": ("ops.capture_targets.run:write_json", 1),
}
OFTEN = [("in the middle of a shard", 0), ("between the end of a shard and its publication", 1)]


def shards_of(stage_dir):
    return {file.name: file.stat().st_ino for file in (stage_dir / "work").glob("*.safetensors")}


@pytest.mark.parametrize(
    "workers", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_the_bytes_of_workers_are_those_of_one_process(tokens, target, features, tmp_path, workers):
    codes = run_workers(RUN, CONFIG, tmp_path, {"tokens": tokens, "target": target}, workers)
    assert [0] * workers == codes
    assert folder_digest(features.path) == folder_digest(tmp_path / "out")
    assert not list((tmp_path / "work").glob("*.partial-*"))
    if workers == 2:
        owners = {link.readlink().name for link in (tmp_path / "shared").glob("*.safetensors.0")}
        assert {"0", "1"} == owners


@pytest.mark.parametrize(
    ("point", "killed"),
    [
        pytest.param(point, killed, marks=() if (point, killed) in OFTEN else pytest.mark.slow)
        for point, killed in product(POINTS, (0, 1))
    ],
)
def test_a_killed_workers_shards_and_artifact_are_made_by_the_others(tokens, target, features, tmp_path, point, killed):
    codes = run_workers(RUN, CONFIG, tmp_path, {"tokens": tokens, "target": target}, 2, {killed: POINTS[point]})
    assert [KILLED if number == killed else 0 for number in range(2)] == codes
    assert folder_digest(features.path) == folder_digest(tmp_path / "out")


def test_two_of_three_workers_may_be_killed_one_after_the_other(tokens, target, features, tmp_path):
    dies = {0: POINTS["while it writes the artifact"], 1: POINTS["in the middle of a shard"]}
    codes = run_workers(RUN, CONFIG, tmp_path, {"tokens": tokens, "target": target}, 3, dies)
    assert [KILLED, KILLED, 0] == codes
    assert folder_digest(features.path) == folder_digest(tmp_path / "out")


def test_a_stopped_worker_keeps_its_shards_and_waits_for_nobody(tokens, target, features, tmp_path):
    inputs = {"tokens": tokens, "target": target}
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "train-00000.safetensors.0").symlink_to("1")  # of a worker that lives
    with pytest.raises(StopRequested, match=r"before train-00003\.safetensors; finished shards are kept"):
        capture_targets(CONFIG, FakeStage(tmp_path, inputs, workers=2, stop_after=2))
    kept = shards_of(tmp_path)
    assert {"train-00001.safetensors", "train-00002.safetensors"} == set(kept)
    for file in (tmp_path / "shared").iterdir():
        file.unlink()
    assert [0, 0] == run_workers(RUN, CONFIG, tmp_path, inputs, 2)
    assert kept.items() <= shards_of(tmp_path).items()
    assert folder_digest(features.path) == folder_digest(tmp_path / "out")


def test_only_worker_0_reports_the_size_and_any_of_them_progress(tokens, target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(capture_run, "open_backend", lambda *given: pytest.fail("nothing is left to capture"))
    plans = [
        f"{split}-{number:05d}.safetensors" for split, count in (("train", 7), ("val", 2)) for number in range(count)
    ]
    for worker in (0, 1):
        stage = FakeStage(tmp_path / str(worker), {"tokens": tokens, "target": target}, worker=worker, workers=2)
        for file in plans:
            (stage.work_dir / file).touch()
        capture_targets(CONFIG, stage)
        assert (worker == 0) == ("bytes a token" in capsys.readouterr().out)
        assert 1 == len(stage.logged)
