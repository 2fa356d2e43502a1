"""An artifact that was altered after its commit is found before a node reads it, and no result is made of it."""

from __future__ import annotations

import os
import time

import pytest
from toy_ops import Toy, wait_for

from executor.store.artifact_store import Store
from executor.store.integrity import check_before_use

CHAIN = """
[pipeline]
name = "toy"
ops = ["toy.py"]

[node.a]
op = "make"
text = "hello"

[node.wait]
op = "make"
seconds = 1.0

[node.b]
op = "join"
texts = ["@a", "@wait"]
"""
ALTERED = 'an input was altered after its commit: of node "a"'


def chain(folder):
    """A chain whose node `wait` ends once the file `go` is there, as it is."""
    toy = Toy(folder, CHAIN)
    ops = folder / "toy.py"
    until_go = 'while config.seconds and not (Path(__file__).parent / "go").exists():\n        time.sleep(0.01)'
    ops.write_text(ops.read_text().replace("time.sleep(config.seconds)", until_go, 1))
    (folder / "go").touch()
    return toy


@pytest.fixture
def toy(tmp_path):
    return chain(tmp_path)


def file_of(toy):
    texts = (path for path in toy.store.glob("objects/*/text.txt") if not path.parent.suffix)
    [file] = (path for path in texts if path.read_text() in ("hello", "HELLO"))
    return file


def alter(file, *, keep_times=False):
    """Overwrite an artifact's file with other content of the same size; keep_times: and with its old
    modification time.
    """
    status = file.stat()
    file.chmod(0o644)
    file.write_text("HELLO")
    if keep_times:
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("keep_times", [False, True])
def test_an_artifact_altered_between_two_nodes_of_one_run_is_not_read(keep_times, toy):
    (toy.folder / "go").unlink()
    running = toy.start("run", str(toy.file))
    wait_for(lambda: list(toy.store.glob("objects/*/text.txt")))
    alter(file_of(toy), keep_times=keep_times)
    (toy.folder / "go").touch()
    _, errors = running.communicate(timeout=300)
    assert running.returncode == 1
    assert ALTERED in errors and "text.txt has other content" in errors
    again = toy.dflow("run", str(toy.file))
    assert again.returncode == 0, again.stderr
    assert toy.text("b") == "hello-a"


def on_another_machine(tmp_path):
    """The environment of a machine that knows nothing of the store's artifacts."""
    return {"XDG_CACHE_HOME": str(tmp_path / f"cache {time.monotonic_ns()}")}


def test_on_another_machine_the_content_is_read_where_that_is_asked_for(toy, tmp_path):
    assert toy.dflow("run", str(toy.file), "--to", "a").returncode == 0
    alter(file_of(toy))
    asked = toy.dflow("run", str(toy.file), "--verify-inputs", **on_another_machine(tmp_path))
    assert asked.returncode == 1 and ALTERED in asked.stderr


def test_what_was_pulled_and_altered_then_is_not_read(toy, tmp_path):
    remote = str(tmp_path / "remote")
    assert toy.dflow("run", str(toy.file), "--to", "a").returncode == 0
    assert toy.dflow("push", remote).returncode == 0
    (tmp_path / "other").mkdir()
    other = chain(tmp_path / "other")
    assert other.dflow("pull", remote, str(other.file)).returncode == 0
    alter(file_of(other))
    result = other.dflow("run", str(other.file))
    assert result.returncode == 1 and ALTERED in result.stderr


def test_what_is_new_to_a_machine_is_not_read_unless_that_is_asked_for(toy, tmp_path, monkeypatch):
    """By reading in this process: a stage of the command would look the same."""
    assert toy.dflow("run", str(toy.file)).returncode == 0
    monkeypatch.setenv("XDG_CACHE_HOME", on_another_machine(tmp_path)["XDG_CACHE_HOME"])
    store = Store.open(toy.store, write=False)
    digest = file_of(toy).parent.name
    read: list[int] = []
    for read_all in (False, False, True):
        assert sum(read) == 0
        assert check_before_use(store, [digest], read_all=read_all, progress=read.append) == {}
    assert sum(read) >= len("hello")


def test_a_changed_stamp_alone_is_no_damage(toy):
    assert toy.dflow("run", str(toy.file), "--to", "a").returncode == 0
    file_of(toy).touch()
    assert toy.dflow("run", str(toy.file)).returncode == 0
