"""Where what dflow says goes when nobody can take it: closed terminals and streams, full ones, Ctrl-C in the plan."""

import json
import os
import pty
import signal
import subprocess
import sys

import pytest
from toy_ops import ONE_NODE, PROJECT, UNTRACKED, Toy, wait_for

from executor.system.output import print_json, print_lines, printable

SLOW = """
[pipeline]
name = "slow"
ops = ["toy.py"]

[node.a]
op = "make"

[node.d]
op = "steps"
text = "@a"
steps = 100000
seconds = 0.05
"""


def environment():
    return {**os.environ, "PYTHONPATH": str(PROJECT), "PYTHONSAFEPATH": "1", "TERM": "xterm"}


def shell(toy, line):
    """Run a line of sh in which $DFLOW is the command."""
    program = {"PROGRAM": UNTRACKED, "PYTHON": sys.executable, "FILE": str(toy.file), "STORE": str(toy.store)}
    line = line.replace("DFLOW", '"$PYTHON" -c "$PROGRAM"')
    return subprocess.run(
        ["sh", "-c", line],
        env={**environment(), **program},
        cwd=toy.folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def in_terminal(toy, errors, to):
    """A run whose controlling terminal is a pty, what it says is plain lines or a live table. Returns both ids."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        os.chdir(toy.folder)
        program = UNTRACKED
        if to == "plain":
            patched = "from executor.scheduler import plain_display as plain\nplain.make_display = plain.Display\n"
            program = patched + UNTRACKED
        arguments = ["-c", program, "run", str(toy.file), "--store", str(toy.store)]
        os.execve(sys.executable, [sys.executable, *arguments], environment())
    return pid, terminal


@pytest.mark.parametrize("to", ["plain", "rich"])
def test_a_run_whose_terminal_is_closed_stops_and_saves(tmp_path, to):
    toy = Toy(tmp_path, SLOW)
    errors = tmp_path / "errors.txt"
    pid, terminal = in_terminal(toy, errors, to)
    os.set_blocking(terminal, False)
    wait_for(lambda: drained(terminal) and len(toy.steps()) > 2)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    state = toy.state()
    last = f"run {state['run']} was stopped; resume with: dflow resume {state['run']}\n"
    assert (os.waitstatus_to_exitcode(status), errors.read_text()) == (128 + signal.SIGHUP, last)
    assert state["status"] == "stopped"
    assert {name: node["state"] for name, node in toy.state()["nodes"].items()} == {"a": "done", "d": "pending"}


def drained(terminal):
    """Read what the terminal shows, so that the run never waits for it."""
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        return True
    return True


def test_a_command_whose_output_goes_to_a_full_disk_names_that_output(tmp_path):
    result = shell(Toy(tmp_path, ONE_NODE), 'DFLOW plan "$FILE" --store "$STORE" >/dev/full')
    assert (result.returncode, result.stderr) == (
        1,
        "dflow: standard output cannot be written: No space left on device\n",
    )


def test_a_run_whose_output_is_closed_runs_all_the_same_and_says_so(tmp_path):
    toy = Toy(tmp_path, ONE_NODE)
    result = shell(toy, 'DFLOW run "$FILE" --store "$STORE" >&-')
    assert result.stderr == "dflow: standard output cannot be written: it is closed\n"
    assert toy.caches() == {"a": ("done", "miss")}


def test_a_working_directory_that_is_gone_is_named(tmp_path):
    toy = Toy(tmp_path, ONE_NODE)
    result = shell(toy, 'mkdir gone; cd gone; rmdir ../gone; DFLOW plan "$FILE" --store "$STORE"')
    text = "dflow: the working directory was removed; change to an existing one (`cd`)\n"
    assert (result.returncode, result.stderr) == (1, text)


def test_ctrl_c_while_a_pipeline_is_planned_ends_without_a_traceback(tmp_path):
    toy = Toy(tmp_path, ONE_NODE)
    source = tmp_path / "toy.py"
    taken = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # where the tests' own parent ignores it
    source.write_text(f"import os, signal\n{taken}\nos.kill(os.getpid(), signal.SIGINT)\n{source.read_text()}")
    result = toy.dflow("run", str(toy.file))
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "dflow: stopped\n")


def test_what_a_terminal_would_obey_is_printed_as_it_is_written(capsys):
    print_lines("a\x1b[2J\x07\rb\tc\nd \ud800 é")
    assert capsys.readouterr().out == "a\\x1b[2J\\x07\\rb\tc\nd \\ud800 é\n"
    assert printable("plain é\n") == "plain é\n"


@pytest.mark.parametrize("ascii_only", [True, False])
def test_what_is_printed_as_json_is_json_whatever_is_in_it(capsys, ascii_only):
    print_json({"a\x7f": [float("nan"), (1.5, "\x1b\x85é")], "b": {"c": float("-inf")}}, ascii_only=ascii_only)
    said = capsys.readouterr().out
    assert {"a\x7f": [None, [1.5, "\x1b\x85é"]], "b": {"c": None}} == json.loads(said, parse_constant=pytest.fail)
    assert [] == [letter for letter in said if letter in "\x1b\x7f\x85"]
