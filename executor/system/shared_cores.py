"""The CPUs that the stages of a user's runs hold on this machine, so that runs at once share them.

<user cache>/cores/lock             flock, held while a run reads what others hold and writes what it holds
<user cache>/cores/<boot>.<random>  of one run: how many CPUs it holds, then those that it may use. flock, held as long
                                    as the run lives: a file without it counts for nothing and is removed

This decides when a stage starts, never how many threads it has, since those change the rounding.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from executor.system.file_locks import is_held
from executor.system.hardware import boot_id
from executor.system.user_cache import user_cache

LOCK = "lock"
YIELDS_S = 0.6  # a run that waits looks every 0.25 s


class SharedCores:
    """The CPU cores that one run holds among all runs of this machine.

    It always gets cores for a first stage; for further ones only if the stages of all runs fit.
    """

    def __init__(self, cpus: int) -> None:
        """Begin without any cores held. cpus: those that the run may use, which may be more than exist."""
        self._usable = os.sched_getaffinity(0)
        self._most = max(cpus, len(self._usable))
        self._held = 0
        self._stage_ended = -YIELDS_S
        self._file: tuple[Path, int] | None = None

    def take(self, cpus: int) -> str:
        """Hold `cpus` more cores for a stage. Returns why the stage must wait for other runs, or "".

        A run whose stage has just ended lets other runs go first, since it is the first to notice free cores.
        """
        reason = ""
        with suppress(OSError, ValueError), _locked() as folder:  # no locks, a full disk: as if no other run was there
            others = self._held_by_others(folder) if self._held else 0
            if others and self._held + cpus + others > self._most:
                reason = f"other runs on this machine use {others} of {self._most} CPUs"
            elif others and time.monotonic() - self._stage_ended < YIELDS_S:
                reason = "other runs on this machine go first"
            else:
                self._write(folder, self._held + cpus)
        self._held += 0 if reason else cpus
        return reason

    def give_back(self, cpus: int, *, was_used: bool) -> None:
        """Release cores. was_used: whether a stage used them, and has ended."""
        self._held -= cpus
        if was_used:
            self._stage_ended = time.monotonic()
        with suppress(OSError), _locked() as folder:
            self._write(folder, self._held)

    def close(self) -> None:
        """Release all cores for good."""
        if self._file is not None:
            path, descriptor = self._file
            self._file = None
            with suppress(OSError):
                path.unlink(missing_ok=True)
            os.close(descriptor)

    def _held_by_others(self, folder: Path) -> int:
        """The number of CPUs held by other runs, except runs that use none of this run's CPUs (`taskset`)."""
        boot, held = boot_id(), 0
        for path in folder.glob(f"{boot}.*"):
            if self._file is not None and path == self._file[0]:
                continue
            if not is_held(path):
                path.unlink(missing_ok=True)
                continue
            number, *usable = map(int, path.read_text().split() or ["0"])
            held += number if self._usable & set(usable) else 0
        return held

    def _write(self, folder: Path, held: int) -> None:
        if self._file is None:
            # By boot, since several machines may share a home folder.
            path = folder / f"{boot_id()}.{secrets.token_hex(8)}"
            self._file = path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._file[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        text = " ".join(map(str, [held, *sorted(self._usable)])).encode()
        os.ftruncate(self._file[1], 0)
        os.pwrite(self._file[1], text, 0)


@contextmanager
def _locked() -> Iterator[Path]:
    """Open a context with the folder of core counts, which only this process uses. Raises OSError without a folder."""
    folder = user_cache("cores")
    if folder is None:
        raise FileNotFoundError("no cache folder that can be written to")
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(descriptor)
