"""The process that measures for `dflow diagnose`: what is told of it, and that it never outlives the command."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from serve_cases import CHECK, SECOND, record_run
from toy_ops import PROJECT, is_alive, wait_for

from executor.cli import main
from executor.model_tools import measure
from executor.system import progress
from executor.system.output import FAILED, INTERRUPTED, OK

SAYS = """
import json, sys
from pathlib import Path
request, answer = map(Path, sys.argv[1:])
node = json.loads(request.read_text())["node"]
print("a warning of a library")
for text in ("1 of 2, loading [the target]", "2 of 2, features"):
    print("dflow: now:", text, flush=True)
measured = {"exported": 2.0, "low": 1.5, "high": 2.5, "corrected": 2.0}
said = {"node": node, "split": "test", "prompts": 8, "dtype": "float32", "device": "cpu", "block_size": 8}
said |= {"instead_of": None, "budget": None, "tau": measured, "evaluation": None, "findings": [], "gains": {}}
answer.write_text(json.dumps(said))
"""
HANGS = """
import os, time
from pathlib import Path
Path(__file__).with_name("pid.partial").write_text(str(os.getpid()))
Path(__file__).with_name("pid.partial").rename(Path(__file__).with_name("pid"))
time.sleep(600)
"""
BREAKS = """
import sys
print("MemoryError: no room")
sys.exit(7)
"""
COMMAND = """
import signal, sys, executor.cli, executor.model_tools.measure
executor.model_tools.measure.DIAGNOSIS = "measuring"
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
sys.exit(executor.cli.main())
"""


@pytest.fixture
def store(tmp_path):
    export = tmp_path / "export"
    export.mkdir()
    (export / "config.json").write_text("{}")
    made = dict.fromkeys(("export", "second", "target", "tokenize"), export)
    return record_run(tmp_path / "p", made, more=CHECK + SECOND)[0]


def stand_in(tmp_path: Path, monkeypatch, code: str) -> None:
    """Let this code run in place of ops/tools/diagnose/run.py."""
    (tmp_path / "measuring.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(measure, "DIAGNOSIS", "measuring")


def test_what_is_measured_is_told_line_by_line_on_standard_error_and_json_stays_json(
    tmp_path, store, monkeypatch, capsys
):
    stand_in(tmp_path, monkeypatch, SAYS)
    assert OK == main(["diagnose", "--json", "--store", str(store.path)])
    out, err = capsys.readouterr()
    assert ["export", "second"] == [draft["node"] for draft in json.loads(out)["drafts"]]
    assert [
        "takes about 5 min 0 s at most for each draft, the loading of its target "
        "included (--budget); 4 prompts are decoded in any case",
        "export: 1 of 2, loading [the target]",
        "export: 2 of 2, features",
        "second: 1 of 2, loading [the target]",
        "second: 2 of 2, features",
    ] == err.splitlines()


def test_on_a_terminal_it_is_one_line_that_is_taken_away(tmp_path, store, monkeypatch, capsys):
    stand_in(tmp_path, monkeypatch, SAYS)
    shown = io.StringIO()
    monkeypatch.setattr(
        progress, "Console", lambda **_: Console(file=shown, force_terminal=True, width=80, _environ={})
    )
    assert OK == main(["diagnose", "--budget", "60", "--store", str(store.path)])
    assert "export: 1 of 2, loading [the target]" in shown.getvalue()
    assert shown.getvalue().endswith("\x1b[2K")
    out, err = capsys.readouterr()
    assert (
        "takes about 1 min 0 s at most for each draft, the loading of its target "
        "included (--budget); 4 prompts are decoded in any case\n",
        True,
    ) == (
        err,
        out.startswith("export: tau 2.00"),
    )


def test_the_end_of_what_a_broken_process_said_is_told(tmp_path, store, monkeypatch, capsys):
    stand_in(tmp_path, monkeypatch, BREAKS)
    assert FAILED == main(["diagnose", "--store", str(store.path)])
    _, said = capsys.readouterr().err.split("\n", 1)
    assert "dflow: export: the diagnosis ended with exit code 7:\n  MemoryError: no room\n" == said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_process_ends_with_the_command_and_leaves_no_file(tmp_path, store, number):
    (tmp_path / "measuring.py").write_text(HANGS)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "diagnose", "--store", str(store.path)],
        env={**os.environ, "PYTHONPATH": f"{PROJECT}:{tmp_path}", "TMPDIR": str(temporary)},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for((tmp_path / "pid").exists, 120.0)
        measuring = int((tmp_path / "pid").read_text())
        command.send_signal(number)
        assert (INTERRUPTED if number == signal.SIGINT else -number) == command.wait(timeout=120)
        wait_for(lambda: not is_alive(measuring), 60.0)
        assert [] == list(temporary.iterdir())
    finally:
        command.kill()
        command.wait()
