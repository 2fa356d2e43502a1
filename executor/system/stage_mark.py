"""The mark that identifies the processes of a stage, even a daemon or a child that ignores SIGTERM.

A stage's process is started with DFLOW_STAGE=<32 random hex digits>, and its children inherit that. So all of them
are found by their environment in /proc, whatever group or session they moved to and whatever they closed.

    work/<key>/mark-<32 hex digits>     an empty file for each mark whose processes may write in that folder
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from dsl.errors import LeaseLost

STAGE = "DFLOW_STAGE"
MARK_FILE = re.compile(r"mark-([0-9a-f]{32})")
END_WITHIN_S = 10.0
POLL_S = 0.02
CHUNK = 1 << 18


def new_mark() -> str:
    """A new random mark: the value of DFLOW_STAGE in a stage's environment."""
    return os.urandom(16).hex()


def note_mark(folder: Path, mark: str) -> None:
    """Record a stage's mark in its work folder, before the stage can write there, for `end_marked`. Raises OSError."""
    (folder / f"mark-{mark}").touch()


def end_marked(folder: Path) -> None:
    """Kill all processes that earlier stages of a work folder left on this machine, so that none writes there any more.

    Raises LeaseLost where a process cannot be killed.
    """
    try:
        marks = [found[1] for path in folder.iterdir() if (found := MARK_FILE.fullmatch(path.name))]
    except FileNotFoundError:
        return
    shown = [f"\0{STAGE}={mark}\0".encode() for mark in marks]
    deadline = time.monotonic() + END_WITHIN_S
    while shown and (remaining := [pid for pid in _pids() if _is_killed(pid, shown)]):
        if time.monotonic() > deadline:
            pids = ", ".join(map(str, remaining))
            raise LeaseLost(f"{folder}: processes of an earlier attempt cannot be ended (process ids {pids}); end them")
        time.sleep(POLL_S)


def _pids() -> list[int]:
    with os.scandir("/proc") as entries:
        return [int(entry.name) for entry in entries if entry.name.isdecimal() and int(entry.name) != os.getpid()]


def _is_killed(pid: int, marks: Sequence[bytes]) -> bool:
    """Send SIGKILL to a process if it has one of the marks. Returns whether it was sent.

    The process is held by a descriptor, so that its id cannot be reused in between.
    """
    if not _has_any(pid, marks):
        return False
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not _has_any(pid, marks):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return False
    except PermissionError:  # it changed its user; the caller reports it in the end
        return True
    finally:
        os.close(descriptor)
    return True


def _has_any(pid: int, marks: Sequence[bytes]) -> bool:
    """Whether the environment of a process holds one of the marks; False for a zombie, which has no environment."""
    try:
        descriptor = os.open(f"/proc/{pid}/environ", os.O_RDONLY)  # every process of this machine is checked
    except OSError:
        return False
    try:
        shown = b"\0"
        while part := os.read(descriptor, CHUNK):
            shown += part
        return any(mark in shown for mark in marks)
    except OSError:
        return False
    finally:
        os.close(descriptor)
