"""A record that came from somebody else names code and settings: looking at it runs none, and nothing acts unasked."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from toy_ops import ONE_NODE, PROJECT, Toy

from executor.records.record_trust import Acting, untrusted_op_files
from executor.system.trust import trust_store
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
    ["push", "remote"],
)
ACTING = (["resume"], ["resume", "--from", "a"], ["resume", "-s", "a.text=x"], ["diagnose"], ["serve"], ["sync", "2"])
UNKNOWN = "not as you ran it here, or you never did"
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


def test_what_a_received_record_would_do_is_refused_with_exit_code_2(received, tmp_path):
    for arguments in ACTING:
        result = received.dflow(*arguments)
        assert (result.returncode, "Traceback" in result.stderr) == (2, False), result.stderr
        assert REFUSED in result.stderr
        assert not (tmp_path / "ran").exists(), arguments


def test_trust_holds_until_the_code_is_another(received, tmp_path):
    assert received.dflow("resume", "--from", "a", "--trust").returncode == 0
    assert received.dflow("resume", "--from", "a").returncode == 0
    source = tmp_path / "toy.py"
    source.write_text(f"{source.read_text()}\n# a comment\n")
    edited = received.dflow("resume", "--from", "a")
    assert edited.returncode == 2 and REFUSED in edited.stderr
    assert received.dflow("run", str(received.file)).returncode == 0
    assert received.dflow("resume", "--from", "a").returncode == 0


def test_a_graph_that_was_altered_is_not_run(received, tmp_path):
    """The op file is as its user knows it, the record's config is somebody else's."""
    assert received.dflow("run", str(received.file), "--trust").returncode == 0
    [graph] = {
        path for path in received.store.glob("records/*/graph.json") if (path.parent / "events.jsonl").exists()
    } - {min(received.store.glob("records/*/graph.json"))}
    graph.write_text(graph.read_text().replace('"hello"', '"bye"'))
    result = received.dflow("resume", "--from", "a")
    assert result.returncode == 2 and f"names what is {UNKNOWN}: its graph; {REFUSED}" in result.stderr


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
    for arguments in (["resume"], ["status"], ["report", "--trust"]):
        result = received.dflow(*arguments)
        assert "Traceback" not in result.stderr and result.returncode in (0, 1), arguments
    assert "is damaged" in received.dflow("resume", "--trust").stderr


def test_tags_of_a_record_that_mlflow_or_dflow_reserve_are_not_sent(received):
    [graph] = received.store.glob("records/*/graph.json")
    graph.write_text(graph.read_text().replace('"tags":{}', '"tags":{"mlflow.note.content":"![](http://x)"}'))
    result = received.dflow("sync", graph.parent.name, "--trust")
    assert result.returncode == 1 and "are reserved" in result.stderr


@pytest.mark.parametrize(
    ("source", "beside"),
    [
        ("import near\n", "near.py"),
        ("def late():\n    from near.deep import x\n", "near/other.py"),
        ("RUN = 'near:capture'\n", "near.py"),
        ("try:\n    import absent\nexcept ImportError: pass\n", "absent.so"),
        ("import middle\n", "near.py"),
    ],
)
def test_the_modules_beside_an_op_file_belong_to_it(source, beside, tmp_path):
    file, module = tmp_path / "own_ops.py", tmp_path / beside
    file.write_text(source)
    (tmp_path / "middle.py").write_text("import near")
    Acting(tmp_path / "runs", b"{}", [file], None).trust()
    assert untrusted_op_files([file]) == []
    module.parent.mkdir(exist_ok=True)
    module.write_text("import os")
    assert untrusted_op_files([file]) == [file]
    (tmp_path / "unrelated.py").write_text("")
    Acting(tmp_path / "runs", b"{}", [file], None).trust()
    (tmp_path / "unrelated.py").write_text("import os")
    assert untrusted_op_files([file]) == []


def test_the_code_of_an_op_file_is_the_same_whether_its_folder_is_on_the_path(tmp_path, monkeypatch):
    """`python -m` puts the working directory there, and the processes that it starts are without it."""
    file, module = tmp_path / "own_ops.py", tmp_path / "near.py"
    file.write_text("import near\n")
    module.write_text("")
    for trusting, asking in (([str(tmp_path)], []), ([], [str(tmp_path)])):
        module.write_text(f"{module.read_text()}import os\n")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [*trusting, *sys.path])
            assert untrusted_op_files([file]) == [file]
            Acting(tmp_path / "runs", b"{}", [file], None).trust()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [*asking, *sys.path])
            assert untrusted_op_files([file]) == []


def test_sending_a_record_that_is_not_trusted_says_so_and_does_not_break(received, tmp_path):
    """As the process beside a run does it, whose user has asked for nothing."""
    [record] = received.store.glob("records/*")
    for trusted in (False, True):
        if trusted:  # the store, not its code
            trust_store(received.store)
        warning, counts = send_rest(received.store, record)
        what = f"{received.folder / 'toy.py'} is not imported: it is {UNKNOWN}" if trusted else str(received.store)
        assert warning is not None and warning.startswith("MLflow lacks a part of the run: ") and what in warning
        assert warning.endswith(f"; read it, then send it with `dflow sync {record.name} --trust`")
        assert not any(counts.values()) and not (tmp_path / "ran").exists()


def test_what_a_command_trusts_holds_for_its_children_where_nothing_can_be_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    monkeypatch.setenv("DFLOW_TRUSTED", "")
    file = tmp_path / "own_ops.py"
    file.write_text("")
    assert untrusted_op_files([file]) == [file]
    Acting(tmp_path / "runs", b"{}", [file], None).trust()
    assert untrusted_op_files([file]) == []
    program = (
        "import sys; from pathlib import Path; from executor.records.record_trust import untrusted_op_files\n"
        "print(untrusted_op_files([Path(sys.argv[1])]))"
    )
    command = [sys.executable, "-c", program, str(file)]
    assert subprocess.run(command, cwd=PROJECT, capture_output=True, text=True).stdout == "[]\n"
