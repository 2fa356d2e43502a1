"""Nodes that fail: tried again, given up, left aside; and what the user is told to do."""

import errno
import json
import os

import pytest
from side_ops import side
from toy_ops import Toy

from dsl.errors import DataError, TransientError
from executor.launchers.failure import DISK_FULL, KINDS, NO_RESULT, TIMEOUT, ended_by, failure, failure_of

SOON = "launch = { retry_wait = 0.1, cpus = 1 }\n"


def flaky(name, times, error="transient", launch=SOON, text=None):
    reads = f'text = "@{text}"\n' if text else ""
    return f'[node.{name}]\nop = "flaky"\ntimes = {times}\nerror = "{error}"\n{reads}{launch}'


def events(toy):
    path = toy.store / "records" / toy.state()["run"] / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("error", ["transient", "declared"])
def test_an_error_that_may_pass_is_tried_again_in_the_same_work_folder(tmp_path, error):
    toy = side(tmp_path, flaky("a", 2, error))
    result = toy.dflow("run", str(toy.file))
    assert (result.returncode, toy.text("a")) == (0, "2"), result.stderr
    name = {"transient": "TransientError", "declared": "VeryBusy"}[error]
    assert f"a: {name}: the server is busy; retry 1 of 2 in 0.1 s" in result.stdout
    assert f"a: {name}: the server is busy; retry 2 of 2 in 0.2 s" in result.stdout
    node = toy.state()["nodes"]["a"]
    assert (node["attempt"], node["cache"], node["metrics"]) == (3, "resumed", {"flaky/try": 2.0})
    kinds = [(event["kind"], event["attempt"], event.get("step")) for event in events(toy) if event["node"] == "a"]
    assert [kind for kind in kinds if kind[0] in ("metric", "cut")] == [
        ("metric", 1, 0), ("cut", 2, 1), ("metric", 2, 1), ("cut", 3, 2), ("metric", 3, 2),
    ]  # fmt: skip
    retries = [event for event in events(toy) if event.get("state") == "retry"]
    assert [event["wait"] for event in retries] == [0.1, 0.2]


def test_an_error_that_does_not_pass_fails_the_node_after_its_retries(tmp_path):
    toy = side(tmp_path, flaky("a", 9, launch="launch = { retries = 1, retry_wait = 0.1 }\n"))
    result = toy.dflow("run", str(toy.file))
    assert result.returncode == 1
    assert "a failed: TransientError: the server is busy (after 1 retry)" in result.stderr
    assert "what to do: a service outside this machine kept failing" in result.stderr
    assert toy.dflow("resume", "-s", "a.launch.retries=9").returncode == 0


def test_a_stage_knows_whether_an_earlier_attempt_began(tmp_path):
    toy = side(tmp_path, flaky("a", 1, "data") + flaky("b", 0) + flaky("c", 1))
    assert toy.dflow("run", str(toy.file), "--keep-going").returncode == 1
    assert toy.dflow("run", str(toy.file)).returncode == 0
    objects = [toy.store / "objects" / toy.state()["nodes"][node]["digest"] for node in "abc"]
    assert ["True", "False", "True"] == [(folder / "started_before.txt").read_text() for folder in objects]


def test_other_errors_are_not_tried_again(tmp_path):
    toy = side(tmp_path, flaky("a", 1, "data"))
    result = toy.dflow("run", str(toy.file))
    assert (result.returncode, toy.state()["nodes"]["a"]["attempt"]) == (1, 1)
    assert "a failed: DataError: the server is busy\n    try 0\n" in result.stderr


def test_other_nodes_run_while_one_waits_for_its_retry(tmp_path):
    late = "launch = { retry_wait = 3600.0 }\n"  # both take the whole machine
    toy = side(tmp_path, flaky("a", 1, launch=late) + flaky("b", 0, launch=late))
    process = toy.start("run", str(toy.file))
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("b: done in"):
            break
    process.terminate()
    process.communicate(timeout=300)
    assert any("a: TransientError: the server is busy; retry 1 of 2 in 3600 s" in line for line in said), said
    assert ["pending", "done"] == [toy.state()["nodes"][name]["state"] for name in "ab"]


def test_an_attempt_that_takes_too_long_is_stopped_and_told_what_to_do(tmp_path):
    limits = "launch = { timeout = 0.5, cpus = 1 }\n"
    toy = side(tmp_path, f'[node.a]\nop = "meet"\nname = "a"\nothers = ["never"]\n{limits}')
    result = toy.dflow("run", str(toy.file))
    assert result.returncode == 1
    assert "a failed: TimeoutError: the attempt took longer than launch.timeout = 0.5 s" in result.stderr
    assert "what to do: raise launch.timeout" in result.stderr
    assert "    stopped: saved" in result.stderr  # it was asked, and saved its progress
    (tmp_path / "never.here").touch()
    assert toy.dflow("resume", "-s", "a.launch.timeout=60").returncode == 0


BRANCHES = flaky("a", 9, "data") + flaky("b", 0, text="a") + flaky("c", 0) + flaky("d", 0, text="c")


def test_with_keep_going_what_does_not_read_from_a_failed_node_runs(tmp_path):
    toy = side(tmp_path, BRANCHES + flaky("e", 8, "data") + flaky("f", 0, text="b"))
    result = toy.dflow("run", str(toy.file), "--keep-going")
    assert result.returncode == 1
    states = {name: node.get("state", "pending") for name, node in toy.state()["nodes"].items()}
    assert states == {"a": "failed", "b": "pending", "c": "done", "d": "done", "e": "failed", "f": "pending"}
    assert result.stderr.count("DataError: the server is busy") == 4  # of each node the error, and its line in the log
    rows = {line.split()[0]: line for line in result.stdout.splitlines()[-8:]}
    assert rows["e"].endswith("  DataError: the server is busy")
    assert (rows["b"].endswith("  not run: a failed"), rows["f"].endswith("  not run: a failed")) == (True, True)
    assert toy.state()["status"] == "failed"
    source = tmp_path / "toy.py"
    source.write_text(source.read_text().replace("if tries < config.times", "if False"))
    result = toy.dflow("resume", "--keep-going")
    assert result.returncode == 0, result.stderr


def test_without_keep_going_nothing_else_starts_and_what_runs_may_save(tmp_path):
    waits = '[node.x]\nop = "meet"\nname = "x"\nothers = ["never"]\nlaunch = { cpus = 1 }\n'
    fails = flaky("a", 9, "transient", launch="launch = { cpus = 1, retries = 1, retry_wait = 1.0 }\n")
    toy = side(tmp_path, "[machine]\ncpus = 2\n" + waits + fails + flaky("late", 0, text="a"))
    result = toy.dflow("run", str(toy.file))
    assert result.returncode == 1
    states = {name: node.get("state", "pending") for name, node in toy.state()["nodes"].items()}
    assert states == {"x": "pending", "a": "failed", "late": "pending"}
    assert "x: stopping, since a failed" in result.stdout
    assert next(toy.store.glob("records/*/x.log")).read_text() == "stopped: saved\n"


def test_the_events_of_a_run_tell_what_the_executor_decided(tmp_path):
    toy = side(tmp_path, flaky("a", 1) + flaky("b", 0, text="a"))
    toy.dflow("run", str(toy.file))
    digest = toy.state()["nodes"]["a"]["digest"]
    told = [(event["node"], event["kind"], event["state"]) for event in events(toy) if "state" in event]
    assert told == [
        ("", "run", "planned"), ("a", "state", "pending"), ("b", "state", "pending"), ("", "run", "started"),
        ("a", "state", "running"), ("a", "state", "retry"), ("a", "state", "running"), ("a", "state", "done"),
        ("b", "state", "running"), ("b", "state", "done"), ("", "run", "done"),
    ]  # fmt: skip
    done = next(event for event in events(toy) if event["node"] == "a" and event.get("state") == "done")
    assert done["digest"] == digest
    assert done["seconds"] >= 0
    toy.dflow("run", str(toy.file), "-s", "b.error=data")
    told = [(event["node"], event["state"], event.get("cache")) for event in events(toy) if "state" in event]
    assert told == [
        ("", "planned", None), ("a", "done", "hit"), ("b", "pending", None), ("", "started", None),
        ("b", "running", "miss"), ("b", "done", "miss"), ("", "done", None),
    ]  # fmt: skip


class OutOfMemoryError(RuntimeError):
    __module__ = "torch"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (failure_of(OutOfMemoryError("CUDA out of memory")), "the GPU's memory is full"),
        (failure_of(MemoryError()), "this machine ran out of memory"),
        (ended_by(-9), "this machine ran out of memory"),
        (failure_of(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))), "the disk is full"),
        (ended_by(-7), "the disk is full"),
        (ended_by(-11), "a compiled library crashed"),
        (ended_by(3), "the process ended itself"),
        (ended_by(None), "this machine ran out of memory"),
        (failure_of(DataError("line 3")), "fix the data"),
        (failure_of(TransientError("busy")), "a service outside this machine kept failing"),
        (failure_of(ModuleNotFoundError("No module named 'sglang'")), "install the missing module"),
        (failure("", (TIMEOUT,)), "raise launch.timeout"),
        (failure_of(ValueError("a bug")), "fix the code, see the traceback"),
    ],
)
def test_a_failure_says_what_to_do(found, expected):
    assert found.advice.startswith(expected)


def test_the_last_hint_fits_every_failure_and_no_name_stands_twice():
    names = [name for _, row, _ in KINDS for name in row]
    assert len(names) == len(set(names))
    assert KINDS[-1][1] == ()
    assert {DISK_FULL, TIMEOUT, NO_RESULT} <= set(names)


def test_a_stage_whose_disk_is_full_says_so(tmp_path):
    toy = Toy(tmp_path)
    file = tmp_path / "toy.py"
    full = 'raise OSError(28, "No space left on device")'
    file.write_text(file.read_text().replace('raise DataError("line 3 of the data is broken")', full))
    result = toy.dflow("run", str(toy.file), "-s", "d.fail_at=1")
    assert "d failed: DiskFull: disk full at " in result.stderr
    assert "what to do: the disk is full: free space there" in result.stderr
