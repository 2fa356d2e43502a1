"""Kill -9: of everything in the middle of a node, and of the executor alone."""

import os
import signal
from contextlib import suppress

import psutil
from stage_processes import processes, stage_pids, two_ranks
from toy_ops import PROJECT, TWO_RANKS, Toy, is_alive, wait_for

# A sitecustomize: a rank has read its job, and does not take its share of the folder before the file `go` is there. It
# has no mark by which the next attempt would find it, and is not tied to its parent, so it lives until then.
LATE = """
import os, sys, time
from pathlib import Path

def late(*told):
    Path(__file__).with_name("waits").touch()
    while not Path(__file__).with_name("go").exists():
        time.sleep(0.02)
    return share(*told)

if "executor.launchers.worker" in sys.orig_argv:
    if "DFLOW_STAGE" in os.environ:
        del os.environ["DFLOW_STAGE"]
        os.execv(sys.executable, sys.orig_argv)
    import executor.store.lease, executor.system.supervisor
    executor.system.supervisor.end_with_parent = lambda parent: None
    share, executor.store.lease.share_ranks = executor.store.lease.share_ranks, late
"""


def test_a_run_that_was_killed_as_a_whole_goes_on_in_the_middle_of_its_node(tmp_path):
    toy = Toy(tmp_path)
    process = toy.start("run", str(toy.file), "-s", "d.steps=600", "-s", "d.seconds=0.1")
    wait_for(lambda: len(toy.steps()) >= 5)
    stages = stage_pids(toy)
    process.kill()
    for pid in stages:
        with suppress(ProcessLookupError):  # it ended with the executor
            os.kill(pid, signal.SIGKILL)
    process.communicate()
    before = len(toy.steps())
    assert "run " + toy.state()["run"] + ": killed" in toy.dflow("status").stdout
    toy.calls()
    result = toy.dflow("resume", "-s", "d.seconds=0.0")
    assert (result.returncode, toy.calls()) == (0, ["steps"])
    assert toy.caches()["d"] == ("done", "resumed")
    steps = [int(step) for step in (toy.folder / "done.txt").read_text().split()]
    assert steps[:before] == list(range(before))
    assert list(range(600)) == sorted(set(steps))
    assert len(steps) <= 602  # its place is kept after every second one


def test_no_stage_outlives_an_executor_that_was_killed_alone(tmp_path):
    toy = Toy(tmp_path)
    process = toy.start("run", str(toy.file), "-s", "d.steps=600", "-s", "d.seconds=0.1")
    wait_for(lambda: len(toy.steps()) >= 1)
    assert len(stage_pids(toy)) == 1
    process.kill()
    wait_for(lambda: stage_pids(toy) == [])
    process.communicate()


def test_a_worker_that_starts_late_leaves_the_next_attempt_alone(tmp_path):
    toy = Toy(tmp_path)
    toy.dflow("run", str(toy.file), "-s", "d.fail_at=0", "-s", "d.seconds=0.1", "-s", "d.steps=10000")
    late = tmp_path / "late"
    late.mkdir()
    (late / "sitecustomize.py").write_text(LATE)
    late_path = f"{late}{os.pathsep}{PROJECT}"
    first = toy.start("resume", "-s", "d.fail_at=-1", "-s", "d.launch.kind=ranks", PYTHONPATH=late_path)
    wait_for((late / "waits").exists)
    pids = late_ranks(toy)
    assert len(pids) == 1
    first.kill()
    wait_for(lambda: stage_pids(toy) == pids)  # the parent of the ranks went with it
    toy.calls()
    second = toy.start("resume", "-s", "d.launch.kind=process")
    wait_for(lambda: len(toy.steps()) >= 1)
    assert set(pids) < set(stage_pids(toy))
    (late / "go").touch()
    wait_for(lambda: not is_alive(pids[0]))
    assert len(stage_pids(toy)) == 1  # that of the second attempt, still at work
    (tmp_path / "end").touch()
    second.communicate(timeout=300)
    first.communicate()
    assert (second.returncode, toy.calls()) == (0, ["steps"])
    steps = (tmp_path / "done.txt").read_text().split()
    assert steps == [str(step) for step in range(len(steps))]


def late_ranks(toy):
    """Ranks of this toy's stages that are processes of their own."""
    ranks = processes(lambda folder: b"executor.launchers.worker" in (folder / "cmdline").read_bytes())
    return [pid for pid in ranks if pid in stage_pids(toy)]


def test_no_rank_outlives_an_executor_that_was_killed_alone(tmp_path):
    toy = Toy(tmp_path, TWO_RANKS)
    process, ranks = two_ranks(toy)
    assert set(ranks) < set(stage_pids(toy))
    process.kill()
    wait_for(lambda: not any(is_alive(pid) for pid in ranks))
    wait_for(lambda: stage_pids(toy) == [])
    process.communicate()


def test_a_stop_reaches_every_rank(tmp_path):
    toy = Toy(tmp_path, TWO_RANKS)
    process, _ = two_ranks(toy)
    process.terminate()
    process.communicate(timeout=300)
    assert process.returncode == 143
    assert sorted(path.name for path in tmp_path.glob("*.saved")) == ["rank-0.saved", "rank-1.saved"]
    assert toy.dflow("resume", "-s", "r.seconds=0.0").returncode == 0
    assert toy.text("r") == "2 ranks, threads 1"


def test_a_stage_that_is_killed_alone_fails_its_node(tmp_path):
    toy = Toy(tmp_path)
    process = toy.start("run", str(toy.file), "-s", "d.steps=600", "-s", "d.seconds=0.1")
    wait_for(lambda: len(toy.steps()) >= 1)
    os.kill(stage_pids(toy)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "d failed: killed (signal 9)" in errors


def test_nothing_is_left_of_a_run_whose_executor_was_killed_alone(tmp_path):
    """Neither its stage nor the worker that waits for the next node."""
    toy = Toy(tmp_path)
    process = toy.start("run", str(toy.file), "-s", "a.seconds=600.0")
    wait_for(lambda: len(psutil.Process(process.pid).children()) == 2 and len(stage_pids(toy)) == 1)
    pids = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
    process.kill()
    wait_for(lambda: not any(is_alive(pid) for pid in pids))
    process.communicate()
