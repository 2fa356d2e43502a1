"""`dflow logs`: what a node printed, and what it prints."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from manifests import new_record
from side_ops import side
from toy_ops import PROJECT, Toy, wait_for

from executor.records.run_record import Record

PRINTS = '[node.a]\nop = "flaky"\ntimes = 2\nlaunch = { retry_wait = 0.1 }\n'


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    toy = side(tmp_path_factory.mktemp("logs"), PRINTS)
    assert toy.dflow("run", str(toy.file)).returncode == 0
    return toy


WHOLE = "try 0\nTransientError: the server is busy\ntry 1\nTransientError: the server is busy\ntry 2\n"


def test_the_whole_log_is_printed_that_of_all_attempts(done):
    assert done.dflow("logs", "a").stdout == WHOLE
    assert done.dflow("logs", done.state()["run"], "a").stdout == WHOLE


def test_the_latest_run_is_named_where_none_was(done):
    run = done.state()["run"]
    assert done.dflow("logs", "a").stderr == f"a in run {run}, the latest:\n"
    assert done.dflow("logs", run, "a").stderr == ""


def test_of_a_node_that_did_not_run_in_the_latest_run_the_run_that_works_on_it_is_named(tmp_path):
    toy = side(tmp_path, '[node.b]\nop = "meet"\nname = "b"\nothers = ["go"]\n')
    running = toy.start("run", str(toy.file))
    wait_for(lambda: (tmp_path / "b.here").exists())
    first = toy.state()["run"]
    later = new_record(toy.store / "records", Record.load(toy.store / "records" / first).graph())
    result = toy.dflow("logs", "b")
    (tmp_path / "go.here").touch()
    running.communicate(timeout=300)
    assert (result.returncode, result.stderr) == (
        1,
        f"dflow: b printed nothing in run {later.run}: it did not run there, its state is pending; it runs in run "
        f"{first}: dflow logs {first} b\n",
    )


def test_the_last_lines_are_printed(done):
    assert done.dflow("logs", "a", "-n", "2").stdout == "TransientError: the server is busy\ntry 2\n"
    assert done.dflow("logs", "-n", "0", "a").stdout == ""


def test_the_losses_of_a_node_are_followed_with_its_log(tmp_path):
    text = '[pipeline]\nname = "toy"\nops = ["toy.py"]\n[node.a]\nop = "make"\n[node.d]\nop = "steps"\ntext = "@a"\n'
    toy = Toy(tmp_path, f"{text}seconds = 0.1\nsteps = 9000\n")
    running = toy.start("run", str(toy.file))
    wait_for(lambda: toy.has_begun() and toy.state()["nodes"]["d"]["state"] == "running")
    follower = toy.start("logs", "d", "-f")
    follows = re.compile(r"\d+ of 9000, (?:[\d.]+/s|[\d.]+ s each), (?:\d+ min )?[\d.]+ s left: steps/loss \S+\n")
    assert any(map(follows.fullmatch, follower.stdout))
    (tmp_path / "end").touch()
    follower.communicate(timeout=300)
    running.communicate(timeout=300)
    assert (0, 0) == (follower.returncode, running.returncode)
    run = toy.state()["run"]
    for follow in ([], ["-f"]):  # once it has ended
        said = toy.dflow("logs", run, "d", *follow).stderr
        assert re.fullmatch(r"\d+ of 9000: steps/loss \S+\n", said), said
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    cached = toy.state()["run"]
    assert run != cached
    said = toy.dflow("logs", cached, "d").stderr.splitlines()
    assert f"d was computed by run {run}; this is its log:" == said[0]
    assert re.fullmatch(r"\d+ of 9000: steps/loss .*", said[1])


def test_following_a_node_that_has_ended_ends(done):
    assert done.dflow("logs", "a", "-f").stdout == WHOLE
    assert done.dflow("logs", "a", "-f", "-n", "1").stdout == "try 2\n"


def test_an_unknown_node_is_told_with_those_that_there_are(tmp_path):
    toy = Toy(tmp_path)
    toy.dflow("run", str(toy.file), "-s", "d.fail_at=1")
    result = toy.dflow("logs", "bb")
    assert result.returncode == 2
    assert 'has no node "bb"; did you mean "b"?; its nodes: a, b, c, d' in result.stderr
    last = toy.state()["run"]
    assert toy.dflow("logs", "d").stdout == "about to fail\nDataError: line 3 of the data is broken\n"
    assert toy.dflow("run", str(toy.file), "--to", "a", "-s", "a.text=other").returncode == 0
    result = toy.dflow("logs", "d")
    assert f'has no node "d"; its newest log is of run {last}: dflow logs {last} d; its nodes: a\n' in result.stderr


@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_of_a_cached_node_the_log_of_the_run_that_computed_it_is_printed_and_that_run_is_named(tmp_path, follow):
    toy = side(tmp_path, PRINTS)
    toy.dflow("run", str(toy.file))
    first = toy.state()["run"]
    toy.file.write_text(toy.file.read_text().replace("[node.a]", "[node.b]"))  # another name in the run that takes it
    toy.dflow("run", str(toy.file))
    result = toy.dflow("logs", "b", "-n", "1", *follow)
    assert (result.returncode, result.stdout) == (0, "try 2\n")
    assert result.stderr == f"b was computed by run {first}; this is its log:\n"
    shutil.rmtree(toy.store / "records" / first)
    result = toy.dflow("logs", "b", *follow)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"dflow: b was computed by run {first}, whose record and log are gone\n"


def test_a_log_is_followed_while_the_node_runs_and_across_its_attempts(tmp_path):
    waits = '[node.b]\nop = "meet"\nname = "b"\nothers = ["go"]\n'
    toy = side(tmp_path, waits + PRINTS.replace("[node.a]", '[node.a]\ntext = "@b"'))
    run = toy.start("run", str(toy.file))
    wait_for(lambda: (tmp_path / "b.here").exists())
    follower = toy.start("logs", "a", "-f")
    (tmp_path / "go.here").touch()
    run.communicate(timeout=300)
    out, errors = follower.communicate(timeout=300)
    assert (run.returncode, follower.returncode, out) == (0, 0, WHOLE), errors


def test_following_ends_with_a_run_that_was_killed(tmp_path):
    toy = side(tmp_path, '[node.b]\nop = "meet"\nname = "b"\nothers = ["never"]\n')
    run = toy.start("run", str(toy.file))
    wait_for(lambda: (tmp_path / "b.here").exists())
    follower = toy.start("logs", "b", "-f")
    run.kill()
    run.communicate()
    _, errors = follower.communicate(timeout=300)
    assert (follower.returncode, errors) == (0, f"b in run {toy.state()['run']}, the latest:\n")


def test_on_a_terminal_a_log_moves_no_cursor(done, monkeypatch):
    """Elsewhere the bytes are those of the file."""
    log = done.store / "records" / done.state()["run"] / "a.log"
    written = log.read_bytes()
    moving = b"\x1b]0;title\x07\tbar\r100%\n\xc2\x9b2J\xc3\xa4\x9b2J \xe2\x80\xaeflow\xe2\x81\xa6\r\nend\n"
    log.write_bytes(moving)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    shown, terminal = os.openpty()
    command = [sys.executable, "-m", "executor.cli", "logs", "a", "--store", str(done.store)]
    assert 0 == subprocess.run(command, stdout=terminal, cwd=done.folder, stderr=subprocess.DEVNULL).returncode
    said = b"\\x1b]0;title\\x07\tbar\r\n100%\r\n\\x9b2J\xc3\xa4\\x9b2J \\u202eflow\\u2066\r\nend\r\n"
    assert said == os.read(shown, 1000)
    os.close(terminal)
    os.close(shown)
    elsewhere = subprocess.run(command, capture_output=True, cwd=done.folder, check=True)
    assert moving == elsewhere.stdout
    log.write_bytes(written)
