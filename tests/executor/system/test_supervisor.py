"""Child processes: how they ended, what is left of them, and that none outlives who started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from toy_ops import is_alive, wait_for

from dsl.imports import child_environment, module_command
from executor.system.supervisor import ChildGroup, exit_text, run_module

# Starts a child that ignores SIGTERM and holds all that is open, and says both process ids.
LEAVES = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("pids.partial", "w").write(f"{os.getpid()} {child.pid}")
os.rename("pids.partial", "pids")
"""
STARTS = """
import subprocess, sys, time
from dsl.imports import child_environment
from executor.system.supervisor import ChildGroup
ChildGroup([sys.executable, "leaves.py"], child_environment(), grace_s=float(sys.argv[1]))
time.sleep(600)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def pids(folder: Path) -> list[int]:
    wait_for((folder / "pids").exists)
    return list(map(int, (folder / "pids").read_text().split()))


@pytest.mark.parametrize(
    ("code", "expected", "text"),
    [
        ("raise SystemExit(3)", 3, "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 11)", -11, "was killed by signal 11 (SIGSEGV)"),
        ("import os; os.kill(os.getpid(), 9)", -9, "was killed (signal 9); perhaps this machine ran out of memory"),
    ],
)
def test_a_group_ends_as_its_command_did(code: str, expected: int, text: str) -> None:
    with ChildGroup([sys.executable, "-c", code], child_environment()) as group:
        assert group.ended_within(60)
    assert (expected, text) == (group.close(), exit_text(group.close()))


@pytest.mark.parametrize("grace_s", [0.0, 0.5])
def test_what_ignores_a_stop_is_killed_with_all_that_it_started(here: Path, grace_s: float) -> None:
    command = [sys.executable, "-c", LEAVES + "time.sleep(600)"]
    with ChildGroup(command, child_environment(), grace_s=grace_s) as group:
        started = pids(here)
        assert not group.ended_within(0)
    assert -signal.SIGKILL == group.close()
    wait_for(lambda: not any(map(is_alive, started)))


@pytest.mark.parametrize("grace_s", ["0", "0.5"])
def test_a_group_ends_with_the_process_that_started_it_when_that_is_killed(here: Path, grace_s: str) -> None:
    (here / "leaves.py").write_text(LEAVES + "time.sleep(600)")
    starter = subprocess.Popen([sys.executable, "-c", STARTS, grace_s], env=child_environment())
    started = pids(here)
    starter.kill()
    starter.wait()
    wait_for(lambda: not any(map(is_alive, started)))


def test_a_module_that_left_a_child_behind_is_not_waited_for_and_the_child_is_killed(here: Path) -> None:
    (here / "leaves.py").write_text(LEAVES + "print('done')")
    done = run_module("leaves", within_s=60)
    assert (0, "done\n", "") == done[:3]
    left = pids(here)
    wait_for(lambda: not any(map(is_alive, left)))


@pytest.mark.parametrize(
    ("code", "within_s", "ended", "reason"),
    [
        ("import time; time.sleep(600)", 1.0, None, "it took longer than 1 s"),
        ("raise ValueError('no such layer')", 60.0, 1, "ValueError: no such layer"),
        ("raise SystemExit(3)", 60.0, 3, "it ended with exit code 3"),
        ("import os, sys; sys.stderr.write('a warning'); sys.stderr.flush(); os.abort()", 60.0, -6, "(SIGABRT)"),
    ],
)
def test_the_reason_of_a_bad_end_is_the_last_line_or_how_it_ended(
    here: Path, code: str, within_s: float, ended: int | None, reason: str
) -> None:
    (here / "failing.py").write_text(code)
    done = run_module("failing", within_s=within_s)
    assert ended == done.code
    assert reason in done.reason


def test_a_module_of_dflow_comes_before_one_of_that_name_in_the_working_directory(here: Path) -> None:
    (here / "dsl").mkdir()
    (here / "dsl" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    subprocess.run(module_command("dsl.errors"), env=child_environment(), check=True)
    assert str(here) == child_environment()["PYTHONPATH"].partition(os.pathsep)[2]
