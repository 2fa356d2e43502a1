"""The rows of benchmarks/execution.py that show what a tool does, not its speed. Each function returns a table cell.

A chain of ten nodes is changed in its middle; a rebuild is killed halfway; two runs start at once; a file has mistakes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.sides.tools import Tool, environment

CHAIN = [f"v{index}" for index in range(10)]
MIDDLE = 5
WAIT_S = 60.0


def changed_value(tool: Tool, folder: Path, _megabytes: int) -> str:
    """How many nodes ran after a change in the middle: same output / other output / changed back."""
    _first_run(tool, folder)
    same, other = ([*CHAIN[:MIDDLE], value, *CHAIN[MIDDLE + 1 :]] for value in (f" {CHAIN[MIDDLE]}", "other"))
    counts = []
    for values in (same, other, CHAIN):
        tool.write_chain(folder, values)
        counts.append(len(_calls_of_a_run(tool, folder)))
    return " / ".join(map(str, counts))


def edited_helper(tool: Tool, folder: Path, _megabytes: int) -> str:
    """How many of ten nodes ran: after an edit of the function that all call / after an edit of a comment in it."""
    _first_run(tool, folder)
    helper = folder / "helper.py"
    counts = []
    for before, after in (("value.strip()", "value.strip().upper()"), ("may be edited", "was edited")):
        text = helper.read_text()
        assert before in text
        helper.write_text(text.replace(before, after))
        counts.append(len(_calls_of_a_run(tool, folder)))
    return " / ".join(map(str, counts))


def killed_rebuild(tool: Tool, folder: Path, megabytes: int) -> str:
    """All processes are killed halfway through a rebuild and the input is restored: does the half count as done?"""
    _large(tool, folder, megabytes)
    (folder / "input.txt").write_text("other text\n")
    process = _start_halfway(tool, folder)
    os.killpg(process.pid, signal.SIGKILL)
    _end_all(folder, process)
    (folder / "input.txt").write_text("first text\n")
    again = _call(tool, folder, tool.run)
    file = tool.large_file(folder)
    is_whole = file.exists() and file.stat().st_size == megabytes << 20 and file.open().readline() == "first text\n"
    if is_whole:
        return "the whole file is there" if again.returncode == 0 else "the run fails"
    size = file.stat().st_size >> 20 if file.exists() else 0
    return f"{size} MB of {megabytes} count as done" if again.returncode == 0 else "the run fails"


def killed_executor(tool: Tool, folder: Path, megabytes: int) -> str:
    """Only the executor is killed halfway through a rebuild, and a second run starts beside the remaining processes."""
    _large(tool, folder, megabytes)
    (folder / "input.txt").write_text("other text\n")
    process = _start_halfway(tool, folder)
    (own,) = _beating(folder)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(1.0)
    orphan_writes = own in _beating(folder)
    second = _start(tool, folder)
    end = time.monotonic() + WAIT_S
    writers = _beating(folder)
    while second.poll() is None and not writers - {own} and time.monotonic() < end:
        writers = _beating(folder)
    both = len(writers) > 1
    _end_all(folder, process, second)
    orphan = "the orphan keeps writing" if orphan_writes else "the node dies with it"
    return f"{orphan}, {'a second writer starts beside it' if both else 'never two writers'}"


def two_runs(tool: Tool, folder: Path, _megabytes: int) -> str:
    """Three nodes of half a second, two runs at once: how often each ran, and the exit codes."""
    tool.make(folder)
    tool.write_chain(folder, CHAIN[:3], seconds=0.5)
    both = [_start(tool, folder) for _ in range(2)]
    codes = [process.wait(timeout=5 * WAIT_S) for process in both]
    calls = _calls(folder)
    counts = ", ".join(f"{calls.count(name)}x" for name in ("n0", "n1", "n2"))
    return f"{counts}; exit codes {codes[0]} and {codes[1]}"


def several_mistakes(tool: Tool, folder: Path, _megabytes: int) -> str:
    """Three mistakes in a file, each of which the tool finds if it is the only one: reported at once / with line."""
    tool.make(folder)
    tool.write_mistakes(folder)
    done = _call(tool, folder, tool.check)
    lines = (done.stdout + done.stderr).splitlines()
    reports = [[line for line in lines if mistake.word in line] for mistake in tool.mistakes]
    placed = [
        any(re.search(rf"(:|line ){mistake.line}\b", line) for line in found)
        for mistake, found in zip(tool.mistakes, reports, strict=True)
    ]
    return f"{sum(map(bool, reports))} of 3, {sum(placed)} with its line"


def what_would_run(tool: Tool, folder: Path, _megabytes: int) -> str:
    """What a dry run predicts for the node that changed, and for the one below it."""
    _first_run(tool, folder)
    tool.write_chain(folder, [*CHAIN[:MIDDLE], "other", *CHAIN[MIDDLE + 1 :]])
    done = _call(tool, folder, tool.dry)
    return tool.predicted(done.stdout + done.stderr, f"n{MIDDLE}", f"n{MIDDLE + 1}")


def _first_run(tool: Tool, folder: Path) -> None:
    tool.make(folder)
    tool.write_chain(folder, CHAIN)
    calls = _calls_of_a_run(tool, folder)
    if len(calls) != len(CHAIN):
        raise RuntimeError(f"{tool.name}: the first run of {len(CHAIN)} nodes ran {calls}")


def _calls_of_a_run(tool: Tool, folder: Path) -> list[str]:
    (folder / "calls.txt").unlink(missing_ok=True)
    done = _call(tool, folder, tool.run)
    if done.returncode:
        raise RuntimeError(f"{tool.name} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return _calls(folder)


def _calls(folder: Path) -> list[str]:
    path = folder / "calls.txt"
    return path.read_text().split() if path.exists() else []


def _call(tool: Tool, folder: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [str(tool.python), *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def _start(tool: Tool, folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [str(tool.python), *tool.run],
            cwd=folder,
            env=environment(),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _large(tool: Tool, folder: Path, megabytes: int) -> None:
    tool.make(folder)
    (folder / "input.txt").write_text("first text\n")
    tool.write_large(folder, megabytes)
    if _calls_of_a_run(tool, folder) != ["large"]:
        raise RuntimeError(f"{tool.name}: the large file was not made")


def _start_halfway(tool: Tool, folder: Path) -> subprocess.Popen[bytes]:
    """A run that waits halfway through the large file."""
    (folder / "hold").touch()
    process = _start(tool, folder)
    end = time.monotonic() + WAIT_S
    while not (folder / "beats.txt").exists():
        if time.monotonic() > end or process.poll() is not None:
            raise RuntimeError(f"{tool.name} did not reach the half: {(folder / 'output.txt').read_text()[-3000:]}")
        time.sleep(0.05)
    return process


def _beating(folder: Path) -> set[int]:
    """The processes that write within half a second."""
    (folder / "beats.txt").unlink(missing_ok=True)
    time.sleep(0.5)
    beats = folder / "beats.txt"
    return {int(pid) for pid in beats.read_text().split()} if beats.exists() else set()


def _end_all(folder: Path, *processes: subprocess.Popen[bytes]) -> None:
    """Kill all remaining processes, and remove the hold."""
    for process in processes:
        _kill(os.killpg, process.pid)
        process.wait()
    for pid in _beating(folder):
        _kill(os.kill, pid)
    (folder / "hold").unlink(missing_ok=True)


def _kill(how: Callable[[int, int], None], pid: int) -> None:
    try:
        how(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
