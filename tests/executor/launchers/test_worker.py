"""The stage as an op sees it, and how a stage's processes are set up."""

import os
import subprocess
import sys
import threading

import pytest
from attrs import evolve
from stage_specs import stage_spec
from toy_ops import PROJECT

from dsl.files import read_lines
from dsl.launch import Launch
from dsl.stage import PoolRendezvous
from executor.launchers import worker
from executor.launchers.host_run import stage_environment
from executor.launchers.worker import WorkerStage
from executor.system.resource_pool import threads_of


@pytest.fixture
def make_stage(tmp_path):
    def make(rank=0, attempt=1, pool=None):
        spec = stage_spec(tmp_path, events=tmp_path / "events.jsonl", figures=tmp_path / "figures", attempt=attempt)
        return WorkerStage({}, tmp_path, tmp_path, rank, 2, 2, 0, 1, pool, "cpu", False, spec, threading.Event())

    return make


def events(tmp_path):
    return [
        {name: value for name, value in event.items() if name not in ("time", "node", "attempt")}
        for event in read_lines(tmp_path / "events.jsonl")
    ]


def test_metrics_of_a_first_attempt_cut_nothing(make_stage, tmp_path):
    make_stage().log({"train/loss": 1}, step=7)
    assert events(tmp_path) == [{"kind": "metric", "step": 7, "metrics": {"train/loss": 1.0}}]


def test_the_first_metrics_of_a_later_attempt_cut_those_before(make_stage, tmp_path):
    stage = make_stage(attempt=2)
    stage.log({"train/loss": 1.0}, step=7)
    stage.log({"train/loss": 0.5}, step=8)
    assert [(event["kind"], event["step"]) for event in events(tmp_path)] == [("cut", 7), ("metric", 7), ("metric", 8)]


def test_only_rank_0_reports_and_no_worker_of_its_pool(make_stage, tmp_path):
    pool = PoolRendezvous(workers=2, worker=0, folder=tmp_path, private=tmp_path, secret="00" * 32)
    for stage in (make_stage(rank=1), make_stage(pool=pool)):
        stage.log({"train/loss": 1.0}, step=7)
        stage.progress(1, 1)
        stage.figure("plot", None)
        assert list(tmp_path.iterdir()) == []
    make_stage(pool=evolve(pool, worker=None)).progress(1, 1)
    assert (tmp_path / "events.jsonl").exists()


def test_progress_is_written_a_few_times_a_second_and_at_the_end(make_stage, tmp_path, monkeypatch):
    clock = iter([100.0, 100.0, 100.1, 100.25, 100.25, 100.3])
    monkeypatch.setattr(worker.time, "monotonic", lambda: next(clock))
    stage = make_stage()
    for done in (1, 2, 3):  # at 100.0 (asked and written), 100.1 (asked), 100.25 (asked and written)
        stage.progress(done, 4)
    stage.progress(4, 4)
    assert [event["done"] for event in events(tmp_path)] == [1, 3, 4]


def test_a_figure_is_a_picture_in_the_record(make_stage, tmp_path):
    class Figure:
        def savefig(self, path):
            path.write_bytes(b"picture")

    make_stage().figure("by/slot", Figure())
    assert (tmp_path / "figures" / "by" / "slot.png").read_bytes() == b"picture"
    assert events(tmp_path) == [{"kind": "figure", "name": "by/slot", "path": str(tmp_path / "figures/by/slot.png")}]


def test_a_figure_that_is_drawn_anew_stays_whole_until_the_new_one_is(make_stage, tmp_path):
    class Half:
        def savefig(self, path):
            path.write_bytes(b"half")
            assert path.suffix == ".png"
            raise OSError("no space")

    kept = tmp_path / "figures" / "plot.png"
    kept.parent.mkdir()
    kept.write_bytes(b"picture")
    with pytest.raises(OSError, match="no space"):
        make_stage().figure("plot", Half())
    assert [(kept, b"picture")] == [(file, file.read_bytes()) for file in kept.parent.glob("*.png")]


def test_threads_are_the_cores_divided_by_the_ranks_unless_given():
    cores = len(os.sched_getaffinity(0))
    assert threads_of(Launch()) == cores
    assert threads_of(Launch(kind="ranks", nproc=4 * cores)) == 1
    assert threads_of(Launch(threads=3)) == 3


def test_an_op_that_makes_use_of_few_threads_gets_no_more_of_them_unless_they_are_given():
    assert [1, 2, 3] == [threads_of(Launch(cpus=3), useful=useful) for useful in (1, 2, 9)]
    assert 2 == threads_of(Launch(kind="ranks", nproc=4, cpus=8), useful=3)
    assert 8 == threads_of(Launch(threads=8, cpus=3), useful=1)


def test_the_environment_of_a_stage_is_pinned(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    environment = stage_environment(2)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE")
    assert [environment[name] for name in names] == ["2", "2", "0", "false", "1"]


def test_the_allocator_of_a_stage_with_gpus_grows_its_segments_unless_the_user_has_chosen(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for gpus in (["0"], None):  # None: nobody knows how many there are, and the stage sees all
        assert "expandable_segments:True" == stage_environment(1, gpus)["PYTORCH_ALLOC_CONF"]
    assert not any("ALLOC_CONF" in name for name in stage_environment(1, []))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    environment = stage_environment(1, ["0"])
    assert "max_split_size_mb:64" == environment["PYTORCH_CUDA_ALLOC_CONF"]
    assert "PYTORCH_ALLOC_CONF" not in environment


STARTED = "import subprocess, sys; large = b'x' * int(9e8); sys.exit(subprocess.run(sys.argv[1:]).returncode)"
PEAK = """
import subprocess, sys
from executor.launchers.worker import _memory
own = b"x" * int(2e8)
subprocess.run([sys.executable, "-c", f"len(b'x' * {int(sys.argv[1])})"], check=True)
print(_memory() / 2.3e8)
"""


@pytest.mark.parametrize(("of_child", "ratio"), [(0, 1.0), (500_000_000, 3.0)])
def test_memory_that_a_child_shows_only_since_its_parent_started_it_does_not_count(of_child, ratio):
    # Nor does that of the one that started this process, as an executor starts a stage.
    command = [sys.executable, "-c", STARTED, sys.executable, "-c", PEAK, str(of_child)]
    printed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    assert float(printed) == pytest.approx(ratio, rel=0.25)
