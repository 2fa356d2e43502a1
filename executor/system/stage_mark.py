"""The mark that identifies the processes of a stage, even a daemon or a child that ignores SIGTERM.

Every process of a stage has DFLOW_STAGE="<work folder>:<id of the lease>" in its environment in /proc, and its
children inherit it. So all of them are found, whatever group or session they moved to and whatever they
closed.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from dsl.errors import LeaseLost

STAGE = "DFLOW_STAGE"
ROOM = 4352  # the longest path and an id
END_WITHIN_S = 10.0
POLL_S = 0.02
CHUNK = 1 << 18
ENV_START, ENV_END = 47, 48  # fields of /proc/<pid>/stat after the name, see proc(5)


def stage_mark(folder: Path, lease_id: str) -> str:
    """The value of DFLOW_STAGE in a stage's environment."""
    return f"{os.path.realpath(folder)}:{lease_id}"


def end_marked(folder: Path) -> None:
    """Kill the processes that stages of a work folder left on this machine, so that none writes there any more.

    Raises LeaseLost where a process cannot be ended.
    """
    mark = f"\0{STAGE}={os.path.realpath(folder)}:".encode()
    deadline = time.monotonic() + END_WITHIN_S
    while remaining := [pid for pid in _pids() if _is_killed(pid, mark)]:
        if time.monotonic() > deadline:
            pids = ", ".join(map(str, remaining))
            raise LeaseLost(f"{folder}: processes of an earlier attempt cannot be ended (process ids {pids}); end them")
        time.sleep(POLL_S)


def show_mark() -> None:
    """Write the mark of this forked process to where /proc shows it, which has its parent's initial environment.

    The parent was started with DFLOW_STAGE=<ROOM blanks>; no variable of this process lies in that memory.
    """
    import ctypes

    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[ENV_START]), int(fields[ENV_END])
    shown = ctypes.string_at(start, end - start)
    place = shown.find(f"{STAGE}={' ' * ROOM}\0".encode())
    if place >= 0:
        room = len(STAGE) + 1 + ROOM
        ctypes.memmove(start + place, f"{STAGE}={os.environ.get(STAGE, '')}".encode()[:room].ljust(room, b"\0"), room)


def _pids() -> list[int]:
    with os.scandir("/proc") as entries:
        return [int(entry.name) for entry in entries if entry.name.isdecimal() and int(entry.name) != os.getpid()]


def _is_killed(pid: int, mark: bytes) -> bool:
    """Whether a process has the mark, and was sent SIGKILL; its id cannot be reused meanwhile."""
    if not _has(pid, mark):
        return False
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not _has(pid, mark):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return False
    except PermissionError:  # it changed its user; the caller reports it in the end
        return True
    finally:
        os.close(descriptor)
    return True


def _has(pid: int, mark: bytes) -> bool:
    """Whether a process has the mark in its environment; False for a zombie, which has none."""
    try:
        descriptor = os.open(f"/proc/{pid}/environ", os.O_RDONLY)  # every process of this machine is checked
    except OSError:
        return False
    try:
        shown = b"\0"
        while part := os.read(descriptor, CHUNK):
            shown += part
        return mark in shown
    except OSError:
        return False
    finally:
        os.close(descriptor)
