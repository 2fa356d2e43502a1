"""Signals that reach more than the executor, or that its shell had ignored or blocked; and a second Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import suppress

import pytest
from side_ops import side
from stage_processes import processes, stage_pids, two_ranks
from toy_ops import ONE_NODE, PROJECT, TWO_RANKS, UNTRACKED, Toy, is_alive, wait_for

HOLDS = '''
@op(version=1, run="toy:hold")
@frozen(kw_only=True)
class Hold:
    """Holds the interpreter, so that no thread of the process can run."""
    output = Text


def hold(config, stage):
    import ctypes
    (Path(__file__).parent / f"rank-{stage.rank}.pid").write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(600)
'''
SIGNALS = '[node.a]\nop = "signals"\n'
SIGNALS_OP = '''
@op(version=1, run="toy:signals")
@frozen(kw_only=True)
class Signals:
    """Writes what it finds of signals, and ends a child."""
    output = Text


def signals(config, stage):
    rows = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if line[:3] == "Sig")
    ignored = int(rows["SigIgn"], 16) & (1 << 31) - 1  # glibc has those behind 31 for itself
    found = {"blocked": int(rows["SigBlk"], 16), "ignored": ignored}
    found["child"] = os.waitstatus_to_exitcode(os.system("exit 3"))
    (stage.out_dir / "text.txt").write_text(json.dumps(found))
'''
# A sitecustomize: the process of a stage gets SIGTERM as the first thing in its life.
STOPPED_AT_ONCE = """
import os, signal, sys

if {"executor.launchers.worker", "executor.launchers.rank_processes"} & {*sys.orig_argv} and "RANK" not in os.environ:
    signal.raise_signal(signal.SIGTERM)
"""
ASKED_OP = '''
@op(version=1, run="toy:asked")
@frozen(kw_only=True)
class Asked:
    """Writes whether a stop was asked for."""
    output = Text


def asked(config, stage):
    (stage.out_dir / "text.txt").write_text(str(stage.stop_requested()))
'''
# However late the executor is asked to stop, its stage's end is known for what it is.
PATIENT = (
    f"import executor.launchers.stage_process; executor.launchers.stage_process.STOP_WITHIN_S = 600.0\n{UNTRACKED}"
)
# Commits that take for ever, from a point on that they tell by a file.
SLOW_COMMITS = {
    "hashes": """
import time
from pathlib import Path
import executor.store.digests

def slow(file, advance):
    Path("hashing").touch()
    while True:
        advance(0)
        time.sleep(0.02)

executor.store.digests.sha256_of = slow
""",
    "waits for processes": """
from pathlib import Path
import executor.scheduler.attempt, executor.store.lease

def slow(name):
    if name == "run:commit-begin":
        executor.store.lease._try_lock = lambda descriptor: False
        Path("hashing").touch()

executor.scheduler.attempt.fail_point = slow
""",
}


def slow_steps(folder, program=""):
    toy = Toy(folder)
    process = toy.start("run", str(toy.file), "-s", "d.steps=600", "-s", "d.seconds=0.1", program=program)
    wait_for(lambda: len(toy.steps()) >= 2)
    return toy, process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_that_is_sent_to_all_processes_at_once_saves_and_the_run_can_be_resumed(tmp_path, number):
    toy, process = slow_steps(tmp_path, PATIENT)
    for pid in (*stage_pids(toy), process.pid):
        with suppress(ProcessLookupError):  # one that ended with those before it
            os.kill(pid, number if pid == process.pid else signal.SIGTERM)
    out, errors = process.communicate(timeout=300)
    assert (128 + number, "stopped") == (process.returncode, toy.state()["status"]), out + errors
    assert ("pending", None) == (toy.state()["nodes"]["d"]["state"], toy.state()["nodes"]["d"]["error"])
    done = len(toy.steps())
    assert 0 == toy.dflow("resume", "-s", "d.steps=600", "-s", "d.seconds=0.0").returncode
    steps = [int(step) for step in (tmp_path / "done.txt").read_text().split()]
    assert (list(range(done)), 600) == (steps[:done], len(set(steps)))


def test_a_stop_that_reaches_the_stage_before_the_executor_is_a_stop(tmp_path):
    toy, process = slow_steps(tmp_path, PATIENT)
    [stage] = stage_pids(toy)
    os.kill(stage, signal.SIGTERM)
    wait_for(lambda: not is_alive(stage))
    process.terminate()
    process.communicate(timeout=300)
    assert (143, "pending") == (process.returncode, toy.state()["nodes"]["d"]["state"])


def test_a_stop_that_reaches_a_stage_in_its_first_moment_is_kept_for_the_op(tmp_path):
    toy = side(tmp_path, '[node.a]\nop = "asked"\n')
    (tmp_path / "toy.py").write_text((tmp_path / "toy.py").read_text() + ASKED_OP)
    (tmp_path / "sitecustomize.py").write_text(STOPPED_AT_ONCE)
    result = toy.dflow("run", str(toy.file), PYTHONPATH=f"{tmp_path}{os.pathsep}{PROJECT}")
    assert (0, "True") == (result.returncode, toy.text("a")), result.stderr


def test_ranks_that_are_asked_to_stop_in_their_first_moment_end(tmp_path):
    toy = Toy(tmp_path, TWO_RANKS)
    (tmp_path / "sitecustomize.py").write_text(STOPPED_AT_ONCE)
    result = toy.dflow("run", str(toy.file), PYTHONPATH=f"{tmp_path}{os.pathsep}{PROJECT}")
    assert (1, True) == (result.returncode, "SIGTERM" in result.stderr), result.stderr
    assert [] == list(tmp_path.glob("rank-*.pid"))


def test_a_stop_that_is_sent_to_all_ranks_too_lets_them_save(tmp_path):
    toy = Toy(tmp_path, TWO_RANKS)
    process, _ = two_ranks(toy, PATIENT)
    for pid in (*stage_pids(toy), process.pid):
        with suppress(ProcessLookupError):  # one that ended with those before it
            os.kill(pid, signal.SIGTERM)
    out, errors = process.communicate(timeout=300)
    assert 143 == process.returncode, out + errors
    assert ["rank-0.saved", "rank-1.saved"] == sorted(path.name for path in tmp_path.glob("*.saved"))
    assert 0 == toy.dflow("resume", "-s", "r.seconds=0.0").returncode


def test_a_rank_that_holds_the_interpreter_ends_with_the_executor(tmp_path):
    toy = Toy(tmp_path, TWO_RANKS.replace('op = "ranks"', 'op = "hold"').replace("seconds = 60.0\n", ""))
    (tmp_path / "toy.py").write_text((tmp_path / "toy.py").read_text() + HOLDS)
    process, ranks = two_ranks(toy)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(is_alive(pid) for pid in ranks))


def test_a_second_stop_ends_a_stage_at_once_even_where_it_was_stopped(tmp_path):
    patient = f"import executor.scheduler.attempt; executor.scheduler.attempt.GRACE_S = 3600.0\n{UNTRACKED}"
    toy, process = slow_steps(tmp_path, patient)  # who is asked once gets an hour
    [stage] = stage_pids(toy)
    os.kill(stage, signal.SIGSTOP)
    process.terminate()
    wait_for(lambda: (next(toy.store.glob("work/*/results-*")) / "stop").exists())
    process.terminate()
    out, errors = process.communicate(timeout=300)
    assert 143 == process.returncode, out + errors
    wait_for(lambda: not is_alive(stage))
    assert 0 == toy.dflow("resume", "-s", "d.steps=600", "-s", "d.seconds=0.0").returncode


@pytest.mark.parametrize("waits", ["hashes", "waits for processes"])
def test_a_second_stop_leaves_a_commit_to_the_next_run(tmp_path, waits):
    toy = Toy(tmp_path, ONE_NODE)
    process = toy.start("run", str(toy.file), program=SLOW_COMMITS[waits] + UNTRACKED)
    wait_for((tmp_path / "hashing").exists)
    process.send_signal(signal.SIGINT)  # two of one kind at once would count as one
    process.terminate()
    out, errors = process.communicate(timeout=300)
    assert (143, "pending") == (process.returncode, toy.state()["nodes"]["a"]["state"]), out + errors
    assert 0 == toy.dflow("resume").returncode
    assert "hello" == toy.text("a")
    assert (1 if waits == "hashes" else 2) == len(toy.calls())


def test_a_stage_finds_signals_as_a_fresh_process_does_whatever_the_shell_had_set(tmp_path):
    toy = side(tmp_path, SIGNALS)
    (tmp_path / "toy.py").write_text((tmp_path / "toy.py").read_text() + SIGNALS_OP)
    program = (
        "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2, signal.SIGTERM])\n"
    )
    process = toy.start("run", str(toy.file), program=program + UNTRACKED)
    out, errors = process.communicate(timeout=300)
    assert 0 == process.returncode, out + errors
    ignored = sum(1 << (number - 1) for number in (signal.SIGPIPE, signal.SIGXFSZ))
    assert {"blocked": 0, "ignored": ignored, "child": 3} == json.loads(toy.text("a"))


def test_a_work_folder_that_somebody_removed_is_one_line(tmp_path):
    toy, process = slow_steps(tmp_path)
    [folder] = (toy.store / "work").iterdir()
    shutil.rmtree(folder.rename(tmp_path / "gone"))  # at once, for who still writes there
    out, errors = process.communicate(timeout=300)
    assert 1 == process.returncode
    assert 'Traceback (most recent call last):\n  File "<string>"' not in errors, errors
    assert str(folder) in errors + out


def test_a_record_that_was_removed_before_the_stage_starts_is_one_line(tmp_path):
    toy = Toy(tmp_path)
    late = (
        "import shutil, sys\nfrom executor.launchers.backends import LocalBackend\nstart = LocalBackend.start\n"
        "def removed(self, order):\n    shutil.rmtree(order.log.parent)\n    return start(self, order)\n"
        "LocalBackend.start = removed\n"
    )
    process = toy.start("run", str(toy.file), program=late + UNTRACKED)
    _, errors = process.communicate(timeout=300)
    assert 1 == process.returncode
    assert "Traceback" not in errors, errors
    assert str(toy.store / "records") in errors
    assert [] == processes(lambda folder: str(tmp_path) in str((folder / "cwd").readlink()))
