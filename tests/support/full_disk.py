"""Disks that are full: a small file system in memory, and a layer that refuses what a process writes to a folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from toy_ops import UNTRACKED

# From the write numbered DFLOW_FULL_AFTER on, nothing under DFLOW_FULL_UNDER can be opened for writing, made or renamed
# into; the file beside it counts what was tried, so it holds more than DFLOW_FULL_AFTER where something was refused.
# Only this process is concerned, not its stages.
LAYER = """
import errno, os, sys, threading

UNDER, AFTER, COUNT = (os.environ["DFLOW_FULL_" + name] for name in ("UNDER", "AFTER", "COUNT"))
WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT
lock = threading.Lock()
tried = 0


def refuse(event, arguments):
    global tried
    if event not in ("open", "os.mkdir", "os.rename"):
        return
    path = arguments[1] if event == "os.rename" else arguments[0]
    if not isinstance(path, (str, os.PathLike)) or not str(path).startswith(UNDER):
        return
    if event == "open" and not (arguments[2] or 0) & WRITES:
        return
    with lock:
        tried = number = tried + 1
        with open(COUNT, "w") as file:
            file.write(str(number))
    if number > int(AFTER):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


sys.addaudithook(refuse)
"""
REFUSING = LAYER + UNTRACKED


def can_mount(folder: Path) -> bool:
    """Whether this user may mount a file system here."""
    folder.mkdir(exist_ok=True)
    if not mount(folder, "64k"):
        return False
    unmount(folder)
    return True


def mount(folder: Path, size: str) -> bool:
    asked = ["mount", "-t", "tmpfs", "-o", f"size={size}", "dflow-test", str(folder)]
    return os.geteuid() == 0 and subprocess.run(asked, capture_output=True, check=False).returncode == 0


def resize(folder: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


def make_read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
