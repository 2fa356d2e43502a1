"""A store that came from somebody else names code and settings: looking at it runs none, and nothing acts unasked."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from toy_ops import ONE_NODE, PROJECT, Toy

from executor.system.trust import is_own_store, trust_store
from executor.tracking.sync_state import send_rest

LOOKING = (
    ["status"],
    ["report", "-o", "page.html"],
    ["runs"],
    ["diff"],
    ["logs", "a"],
    ["doctor", "--verify"],
    ["gc", "--usage"],
    ["gc"],
)
ACTING = (["resume"], ["resume", "--from", "a"], ["resume", "-s", "a.text=x"], ["diagnose"], ["serve"], ["sync", "2"])
WRITING = (["gc", "--delete"], ["push", "remote"], ["rm", "2", "--yes"], ["runs", "--tag", "kept", "2"], ["report"])
REFUSED = "read it, then repeat the command with --trust"


@pytest.fixture
def received(tmp_path):
    """A project with the record of a run that somebody else made; its op file makes the file `ran` when imported."""
    toy = Toy(tmp_path, ONE_NODE, tracked=True)
    source = tmp_path / "toy.py"
    source.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{source.read_text()}")
    ran = toy.dflow("run", str(toy.file), "-s", "mlflow.tracking=false", XDG_STATE_HOME=str(tmp_path / "theirs"))
    assert ran.returncode == 0, ran.stderr
    (tmp_path / "ran").unlink()
    return toy


def test_looking_at_a_received_store_imports_no_op_file(received, tmp_path):
    for arguments in LOOKING:
        result = received.dflow(*arguments)
        assert result.returncode in (0, 1) and "Traceback" not in result.stderr, result.stderr
        assert not (tmp_path / "ran").exists(), arguments
    assert REFUSED in (tmp_path / "page.html").read_text()


def test_what_would_act_for_a_received_store_is_refused_with_exit_code_2(received, tmp_path):
    for arguments in (*ACTING, *WRITING):
        result = received.dflow(*arguments)
        assert (result.returncode, "Traceback" in result.stderr) == (2, False), result.stderr
        assert REFUSED in result.stderr
        assert not (tmp_path / "ran").exists(), arguments
    assert not (tmp_path / "remote").exists()


def test_trust_is_given_once_and_holds_for_all_that_the_store_does(received, tmp_path):
    assert received.dflow("resume", "--from", "a", "--trust").returncode == 0
    source = tmp_path / "toy.py"
    source.write_text(f"{source.read_text()}\n# a comment\n")
    for command in (["resume", "--from", "a"], ["run", str(received.file)], ["report"], ["gc", "--delete"]):
        assert received.dflow(*command).returncode == 0, command


def test_a_store_of_somebody_else_where_an_own_one_lay_is_not_trusted(received, tmp_path):
    """Its place is the same, and its id is another, or none."""
    theirs = received.store.rename(tmp_path / "of theirs")
    assert received.dflow("run", str(received.file)).returncode == 0
    received.store.rename(tmp_path / "moved away")
    theirs.rename(received.store)
    for id_of in ("theirs", "none"):
        if id_of == "none":
            (received.store / ".id").unlink()
        (tmp_path / "ran").unlink(missing_ok=True)
        result = received.dflow("resume", "--from", "a")
        assert result.returncode == 2 and REFUSED in result.stderr, id_of
        assert received.dflow("status").returncode == 0
        assert not (tmp_path / "ran").exists(), id_of


@pytest.mark.parametrize("answer", ["y", "n", ""])
def test_a_user_at_a_terminal_is_asked(answer, received):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "executor.cli", "resume", "--from", "a", "--store", str(received.store)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "TERM": "dumb"}
    process = subprocess.Popen(command, env=environment, stdin=theirs, stderr=theirs, stdout=theirs, cwd=PROJECT)
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    shown = b""
    while True:
        try:
            read = os.read(ours, 4096)
        except OSError:  # its end, on Linux
            break
        shown += read
        if not read:
            break
    os.close(ours)
    assert b"It could run any code as you. Trust it? [y/N]" in shown
    assert process.wait() == (0 if answer == "y" else 2), shown


def test_no_code_comes_from_inside_a_store(received, tmp_path):
    """Not even by --trust, and not where its user wrote the path into a pipeline file."""
    inside = received.store / "objects" / "toy.py"
    inside.write_text((received.folder / "toy.py").read_text())
    whole = received.file.read_text()
    received.file.write_text(whole.replace('"toy.py"', '"runs/objects/toy.py"'))
    (received.store / "pipeline.py").write_text(inside.read_text())
    refused = f"lies inside the store {received.store}, from which no code is"
    for file in (str(received.file), "runs/pipeline.py"):
        for command in (["run", file], ["plan", file], ["plan", file, "--graph"], ["plan", file, "--why", "a"]):
            result = received.dflow(*command)
            assert result.returncode == 2 and refused in result.stderr, command
    [record] = received.store.glob("records/*")
    graph = record / "graph.json"
    graph.write_text(graph.read_text().replace("../toy.py", "objects/toy.py"))
    for arguments, code in ((["resume"], 2), (["resume", "--trust"], 2), (["sync", record.name], 1)):
        result = received.dflow(*arguments)
        assert result.returncode == code and (REFUSED in result.stderr or refused in result.stderr), arguments
    assert received.dflow("report", "-o", "page.html").returncode == 0
    assert refused in (received.folder / "page.html").read_text()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_graph_that_is_no_file_is_damaged_and_not_waited_for(kind, received):
    [graph] = received.store.glob("records/*/graph.json")
    graph.unlink()
    os.mkfifo(graph) if kind == "pipe" else graph.symlink_to("/dev/zero")
    for arguments in (["status"], ["report", "--trust"], ["resume"]):
        result = received.dflow(*arguments)
        assert "Traceback" not in result.stderr and result.returncode in (0, 1), arguments
    assert "is damaged" in result.stderr


def test_tags_of_a_record_that_mlflow_or_dflow_reserve_are_not_sent(received):
    [graph] = received.store.glob("records/*/graph.json")
    graph.write_text(graph.read_text().replace('"tags":{}', '"tags":{"mlflow.note.content":"![](http://x)"}'))
    result = received.dflow("sync", graph.parent.name, "--trust")
    assert result.returncode == 1 and "are reserved" in result.stderr


def test_sending_a_record_of_a_store_that_is_not_trusted_says_so_and_does_not_break(received, tmp_path):
    """As the process beside a run does it, whose user has asked for nothing."""
    [record] = received.store.glob("records/*")
    warning, counts = send_rest(received.store, record)
    assert warning is not None and warning.startswith("MLflow lacks a part of the run: the store ")
    assert warning.endswith(f"; read it, then send it with `dflow sync {record.name} --trust`")
    assert not any(counts.values()) and not (tmp_path / "ran").exists()


def test_what_a_command_trusts_holds_for_its_children_where_nothing_can_be_remembered(received, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    monkeypatch.setenv("DFLOW_TRUSTED", "")
    assert not is_own_store(received.store)
    trust_store(received.store)
    assert is_own_store(received.store)
    program = (
        "import sys; from pathlib import Path; from executor.system.trust import is_own_store\n"
        "print(is_own_store(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", program, str(received.store)]
    assert subprocess.run(command, cwd=PROJECT, capture_output=True, text=True).stdout == "True\n"
