"""Two runs at once on one machine, each in a store of its own, share its CPUs."""

import json
import os
import signal

import pytest
from side_ops import side
from toy_ops import UNTRACKED, wait_for

TWO_CPUS = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
"""
MACHINE = "[machine]\ncpus = 2\n"
ONE_CPU = "launch = { cpus = 1 }\n"


def meet(name, *others, more=ONE_CPU):
    return f'[node.{name}]\nop = "meet"\nname = "{name}"\nothers = {json.dumps(others)}\n{more}'


def toy(folder, nodes):
    folder.mkdir()
    return side(folder, MACHINE + nodes)


def start(toy):
    return toy.start("run", str(toy.file), program=TWO_CPUS + UNTRACKED)


@pytest.mark.parametrize("is_killed", [False, True], ids=["ends", "is killed"])
def test_a_run_has_one_stage_beside_another_run_and_a_second_once_that_one(is_killed, tmp_path):
    first = toy(tmp_path / "first", meet("a", "b", "go") + meet("b", "a", "go"))
    heavy = '[node.heavy]\nop = "small"\nsize = 100\n'  # takes all CPUs
    after = 'text = "@heavy"\n' + ONE_CPU
    second = toy(tmp_path / "second", heavy + meet("c", "d", more=after) + meet("d", "c", more=after))
    holder = start(first)
    wait_for(lambda: all((first.folder / f"{name}.here").exists() for name in "ab"))
    other = start(second)
    shown = []
    for line in other.stdout:
        shown.append(line)
        if line.startswith("d: waiting"):
            break
    assert "d: waiting for CPUs: needs 1; other runs on this machine use 2 of 2 CPUs\n" == shown[-1]
    wait_for((second.folder / "c.here").exists)
    assert not (second.folder / "d.here").exists()
    if is_killed:
        os.kill(holder.pid, signal.SIGKILL)
    else:
        (first.folder / "go.here").touch()
    _, errors = other.communicate(timeout=300)  # c ends only beside d
    holder.communicate(timeout=300)
    assert (0, -signal.SIGKILL if is_killed else 0) == (other.returncode, holder.returncode), errors
    # Beside two busy stages, a stage has as many threads as by itself.
    assert "2" == second.text("heavy")
