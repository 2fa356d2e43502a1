"""A stage that was stopped while its executor died, and goes on when another run has its node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from manifests import made
from toy_ops import PROJECT, Toy, is_alive, wait_for

from dsl.files import read_lines
from executor.store import lease as lease_module
from executor.store.artifact_store import Store

OPS = '''
import os, time
from pathlib import Path
from attrs import frozen
from dsl.op import Artifact, field, op

HERE = Path(__file__).parent


@frozen
class Text(Artifact):
    """text.txt"""


@op(version=1, run="toy:slow")
@frozen(kw_only=True)
class Slow:
    """Keeps a file open and writes to it, for a long time the first time."""
    output = Text


def slow(config, stage):
    first = not (HERE / "pid").exists()
    with (stage.out_dir / "text.txt").open("w") as file:
        (HERE / "pid").write_text(str(os.getpid()))
        for _ in range(6000 if first else 3):
            file.write("late" if first else "word")
            file.flush()
            time.sleep(0.01)
'''

PIPELINE = """
[pipeline]
name = "late"
ops = ["toy.py"]

[node.slow]
op = "slow"
"""

LATE = """
import sys, time
from pathlib import Path
from executor.store.lease import share_ranks

folder = Path(sys.argv[1])
descriptor = share_ranks(folder, int(sys.argv[2]), sys.argv[3])
(folder / "started").touch()
time.sleep(600)
"""


def test_a_stage_that_was_stopped_while_its_executor_was_killed_writes_into_nothing_that_is_committed(tmp_path):
    toy = Toy(tmp_path, PIPELINE)
    (tmp_path / "toy.py").write_text(OPS)
    first = toy.start("run", str(toy.file))
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    stage = int((tmp_path / "pid").read_text())
    os.kill(stage, signal.SIGSTOP)
    first.kill()
    first.communicate()
    second = toy.start("resume")
    if is_alive(stage):
        os.kill(stage, signal.SIGCONT)
    out, errors = second.communicate(timeout=300)
    assert 0 == second.returncode, out + errors
    wait_for(lambda: not is_alive(stage))
    digest = toy.state()["nodes"]["slow"]["digest"]
    store = Store(toy.store)
    assert ("wordwordword", []) == (toy.text("slow"), store.altered(digest))
    assert [1] == [len(read_lines(path)) for path in (toy.store / "index").iterdir()]


def test_while_a_late_writer_lives_the_next_holder_waits_and_then_says_which_process_it_is(tmp_path, monkeypatch):
    """A process that is stopped cannot be told from one at work: nothing of the folder may be used while it lives."""
    store = Store.open(tmp_path / "runs", write=True)
    with store.lease("key", "r1") as lease:
        lease.acquire(print)
        lease.empty(keep_state=False)
        told = [str(lease.folder), str(lease.token), lease.id]
        late = subprocess.Popen([sys.executable, "-c", LATE, *told], cwd=PROJECT)
        wait_for(lambda: (lease.folder / "started").exists())
        late.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(lease_module, "LATE_WRITERS_S", 0.3)
    with store.lease("key", "r2") as lease:
        lease.acquire(print)
        with pytest.raises(lease_module.LeaseLost, match=rf"still run there \(process ids {late.pid}\)"):
            lease.wait_for_ranks()
        with pytest.raises(lease_module.LeaseLost, match="still run there"):
            store.commit(lease, *made("key", "r2"))
        late.kill()
        late.wait()
        lease.wait_for_ranks()
