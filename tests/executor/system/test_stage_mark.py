"""Processes that a stage leaves running, and whatever else outlives an attempt, write into no artifact."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from toy_ops import Toy, is_alive, wait_for

from executor.store.artifact_store import Store

OPS = '''
import os, signal, subprocess, sys, time
from pathlib import Path
from attrs import frozen
from dsl.errors import TransientError
from dsl.op import Artifact, field, op

HERE = Path(__file__).parent
WRITES = """
trap "" TERM
echo $$ > {here}/writer
while true; do echo late > {out}/text.txt; echo late > {out}/more.txt; sleep 0.02; done
"""


@frozen
class Text(Artifact):
    """text.txt"""


@op(version=1, run="toy:first")
@frozen(kw_only=True)
class First:
    """Takes until the worker of the next node has been started."""
    output = Text


def first(config, stage):
    while not any(map(is_ahead, Path("/proc").glob("[0-9]*"))):
        time.sleep(0.02)
    (stage.out_dir / "text.txt").write_text("first")


def is_ahead(process):
    """Whether it is a worker of this executor that waits for a node."""
    try:
        parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        waits = b"--ahead" in (process / "cmdline").read_bytes().split(b"\\0")
    except OSError:  # it has ended
        return False
    return waits and parent == os.getppid() and int(process.name) != os.getpid()


@op(version=1, run="toy:leave", resumable=True)
@frozen(kw_only=True)
class Leave:
    """Leaves a process behind that writes for ever, the first time."""
    how: str
    end: str
    text: Text | None = None
    output = Text


def leave(config, stage):
    first = not any(stage.work_dir.iterdir())
    (stage.work_dir / "begun").touch()
    (HERE / "started").write_text(" ".join(sys.orig_argv))
    if first:
        {"child": child, "session": session, "fork": fork}[config.how](stage.out_dir)
        while not ((HERE / "writer").exists() and (HERE / "writer").read_text().endswith("\\n")):
            time.sleep(0.01)
        if config.end == "wait":
            time.sleep(600)
        if config.end == "fail":
            raise TransientError("once")
    (stage.out_dir / "text.txt").write_text("good")
    if not first:
        time.sleep(0.3)


def child(out):
    subprocess.Popen(["bash", "-c", WRITES.format(here=HERE, out=out)])


def session(out):
    subprocess.Popen(["bash", "-c", WRITES.format(here=HERE, out=out)], start_new_session=True)


def fork(out):
    """Holds no file of the stage, and was never started as a program."""
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, 1000)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (HERE / "writer").write_text(f"{os.getpid()}\\n")
        while True:
            out.mkdir(exist_ok=True)
            for name in ("text.txt", "more.txt"):
                (out / name).write_text("late")
            time.sleep(0.02)
'''

PIPELINE = """
[pipeline]
name = "left"
ops = ["toy.py"]

[node.a]
op = "leave"
how = "{how}"
end = "{end}"
launch = {{ retry_wait = 0.0 }}
"""


def leaving(folder: Path, how: str, end: str) -> Toy:
    toy = Toy(folder, PIPELINE.format(how=how, end=end))
    (folder / "toy.py").write_text(OPS)
    return toy


def writer(toy: Toy) -> int | None:
    path = toy.folder / "writer"
    text = path.read_text() if path.exists() else ""
    return int(text) if text.endswith("\n") else None


def assert_good(toy: Toy) -> None:
    """The artifact is what the last attempt wrote, and nothing runs that could change it."""
    digest = toy.state()["nodes"]["a"]["digest"]
    store = Store(toy.store)
    assert ("good", []) == (toy.text("a"), store.altered(digest))
    assert {"text.txt", "manifest.json"} == {path.name for path in store.object_path(digest).iterdir()}
    pid = writer(toy)
    assert pid is not None
    wait_for(lambda: not is_alive(pid))


@pytest.mark.parametrize("how", ["child", "session", "fork"])
def test_what_a_killed_stage_left_running_does_not_reach_the_next_attempts_artifact(tmp_path, how):
    toy = leaving(tmp_path, how, "wait")
    first = toy.start("run", str(toy.file))
    wait_for(lambda: writer(toy) is not None)
    first.kill()
    first.communicate()
    result = toy.dflow("resume")
    assert 0 == result.returncode, result.stderr
    assert_good(toy)


def test_what_a_worker_that_was_started_ahead_left_running_does_not_reach_the_next_attempts_artifact(tmp_path):
    toy = leaving(tmp_path, "fork", "wait")
    toy.file.write_text(toy.file.read_text() + 'text = "@b"\n\n[node.b]\nop = "first"\n')
    first = toy.start("run", str(toy.file))
    wait_for(lambda: writer(toy) is not None)
    assert "--ahead" in (tmp_path / "started").read_text().split()
    first.kill()
    first.communicate()
    result = toy.dflow("resume")
    assert 0 == result.returncode, result.stderr
    assert_good(toy)


@pytest.mark.parametrize("how", ["child", "session", "fork"])
def test_what_a_failed_stage_left_running_does_not_reach_the_artifact_of_its_retry(tmp_path, how):
    toy = leaving(tmp_path, how, "fail")
    result = toy.dflow("run", str(toy.file))
    assert 0 == result.returncode, result.stderr
    assert_good(toy)


def test_a_process_that_ignores_the_end_of_its_stage_is_killed_with_its_group(tmp_path):
    """At once, without another attempt at the node."""
    toy = leaving(tmp_path, "child", "wait")
    toy.file.write_text(toy.file.read_text().replace("retry_wait = 0.0", "retries = 0"))
    process = toy.start("run", str(toy.file))
    wait_for(lambda: writer(toy) is not None)
    pid = writer(toy)
    assert pid is not None
    stage = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(stage, signal.SIGKILL)
    process.communicate(timeout=300)
    assert 1 == process.returncode
    wait_for(lambda: not is_alive(pid))
