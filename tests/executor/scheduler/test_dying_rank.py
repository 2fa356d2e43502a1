"""A rank that dies: the others end soon, and the error names the rank that died first and its cause."""

import json
import signal

import pytest
from toy_ops import Toy

from executor.launchers.failure import first_failed, only_lost_connections
from executor.launchers.stage_contract import RankError, RankExit, RankResult
from executor.launchers.worker import _lost_connection

# Declaration and run function are two files, since a run loads the declarations without torch.
OPS = '''
from attrs import frozen
from dsl.op import Artifact, field, op

@frozen
class Nothing(Artifact):
    """no file"""

@op(version=1, run="dying_run:die", sequence_parallel=True)
@frozen(kw_only=True)
class Die:
    """Rank 1 dies in the middle."""
    how: str = field(help="kill, data, bug or hang")
    output = Nothing
'''
RUN = """
import os, signal, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from dsl.errors import DataError
from ops.lib.training.rank_group import meeting_store

def die(config, stage):
    store = meeting_store(stage.rank, stage.world_size)
    dist.init_process_group("gloo", store=store, rank=stage.rank, world_size=stage.world_size)
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    if stage.rank == 1:
        (Path(__file__).parent / "died").write_text(str(stage.sp_degree))
        if config.how not in ("data", "bug"):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            raise {"data": DataError, "bug": ValueError}[config.how]("shard 3 is broken")
        finally:
            dist.destroy_process_group()
            end = time.monotonic() + 60
            while not list(stage.work_dir.parent.glob("results-*/0.json")) and time.monotonic() < end:
                time.sleep(0.01)  # rank 0 reports before this rank does
    if config.how == "hang":  # Python's signal handlers do not run in there
        dist.TCPStore("127.0.0.1", 0, is_master=True).wait(["never"], timedelta(minutes=5))
    dist.all_reduce(torch.ones(1))
"""
PIPELINE = """
[pipeline]
name = "dying"
ops = ["dying.py"]

[node.r]
op = "die"
how = "HOW"
launch = { kind = "ranks", nproc = 2, sp_degree = 2, threads = 1 }
"""
KILLED = "rank 1 was killed (signal 9); perhaps this machine ran out of memory (rank 0 ended after it)"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The toy and the command's stderr, for each way in which a rank dies."""
    toys = {}
    for how in ("kill", "data", "bug", "hang"):
        folder = tmp_path_factory.mktemp(how)
        (folder / "dying.py").write_text(OPS)
        (folder / "dying_run.py").write_text(RUN)
        toys[how] = Toy(folder, PIPELINE.replace("HOW", how))
    processes = {how: toy.start("run", str(toy.file)) for how, toy in toys.items()}
    return {how: (toys[how], process.communicate(timeout=280)[1]) for how, process in processes.items()}


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("kill", KILLED),
        ("data", "DataError (rank 1): shard 3 is broken (rank 0 ended after it)"),
        ("bug", "ValueError (rank 1): shard 3 is broken (rank 0 ended after it)"),
        ("hang", KILLED),
    ],
    ids=["kill", "data", "bug", "hang"],
)
def test_a_rank_that_dies_ends_the_others_and_is_named(runs, how, expected):
    toy, errors = runs[how]
    node = toy.state()["nodes"]["r"]
    assert ("failed", expected) == (node["state"], node["failure"]["what"])
    assert f"r failed: {expected}\n" in errors
    assert "2" == (toy.folder / "died").read_text()


def test_a_rank_that_hangs_ends_itself_before_it_would_be_killed_30_seconds_later(runs):
    toy, _ = runs["hang"]
    exits = json.loads(next(toy.store.glob("work/*/results-*/exits-0.json")).read_text())
    assert {0: -signal.SIGALRM, 1: -signal.SIGKILL} == {exit["rank"]: exit["code"] for exit in exits}


def test_the_traceback_of_the_rank_that_died_is_what_is_shown_though_others_reported_before_it(runs):
    toy, errors = runs["bug"]
    head = "r failed: ValueError (rank 1): shard 3 is broken (rank 0 ended after it)\n"
    trace = f'    Traceback (most recent call last):\n      File "{toy.folder / "dying_run.py"}", line'
    assert errors.startswith(head + trace)
    assert "    ValueError: shard 3 is broken\n  what to do: " in errors
    assert "gloo" not in errors
    log = next(toy.store.glob("records/*/r.log")).read_text()
    assert log.index("gloo") < log.index("ValueError: shard 3 is broken")


def test_the_error_of_a_rank_that_was_taken_along_stays_in_the_log(runs):
    assert "gloo" in runs["data"][1]
    assert "rank 0: another rank has failed; this one ends within 10 s" in runs["hang"][1]


def failed(time, message, lost_connection=False, name="DataError"):
    error = RankError(name=name, message=message, time=time, lost_connection=lost_connection)
    return RankResult(status="failed", error=error)


DONE = RankResult(status="done")
STOPPED = RankResult(status="stopped")
LOST = "Connection closed by peer"


@pytest.mark.parametrize(
    ("results", "exits", "expected"),
    [
        ([failed(7.0, "a")], [], "DataError: a"),
        ([failed(7.0, "a"), failed(6.9, "b")], [], "DataError (rank 1): b (rank 0 ended after it)"),
        ([failed(6.0, LOST, True), None, failed(7.0, "a")], [], "DataError (rank 2): a (ranks 0, 1 ended after it)"),
        ([DONE, failed(7.0, LOST, True, "DistError")], [], f"DistError (rank 1): {LOST}"),
        ([None, None], [(0, -signal.SIGALRM, 19), (1, -signal.SIGSEGV, 9)],
         "rank 1 was killed by signal 11 (SIGSEGV) (rank 0 ended after it)"),
        ([failed(9.1, "others failed"), None], [(0, 1, 9), (1, -9, 9)], KILLED),
        ([failed(8.9, "a"), None], [(0, 1, 9), (1, -9, 39)], "DataError (rank 0): a (rank 1 ended after it)"),
        ([failed(8.9, "a"), None], [(0, 1, 9), (1, -6, 9)], "DataError (rank 0): a (rank 1 ended after it)"),
        ([DONE, None], [(1, 3, 9)], "rank 1 ended with exit code 3 and without a result"),
        ([DONE, None], [], None),
        ([None, DONE], [(1, -9, 9)], KILLED),
        ([None, STOPPED], [(1, -9, 9), (0, -15, 9)], KILLED),
        ([STOPPED, STOPPED], [(0, 75, 9), (1, 75, 9)], None),
        ([STOPPED, None], [], None),
    ],
)  # fmt: skip
def test_the_rank_that_failed_first_is_the_cause_and_lost_connections_come_last(results, exits, expected):
    cause = first_failed(results, [RankExit(*seen) for seen in exits])
    assert expected == (cause and cause.text)


def test_a_stop_that_tears_connections_down_is_no_failure():
    assert only_lost_connections([STOPPED, failed(7.0, LOST, True)])
    assert not only_lost_connections([STOPPED, failed(7.0, "a")])


def test_a_lost_connection_is_known_by_its_library_and_not_by_its_words():
    gloo = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    wrapped = ValueError("the other ranks are gone")
    wrapped.__cause__ = gloo
    backend = type("DistBackendError", (type("DistError", (RuntimeError,), {}),), {})("NCCL communicator was aborted")
    errors = [gloo, wrapped, backend, ConnectionResetError("Connection reset by peer"), RuntimeError(LOST)]
    assert [True, True, True, False, False] == [_lost_connection(error) for error in errors]
