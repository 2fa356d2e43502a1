"""The right to work on one key: a lock that ends with its holder, and a token that distinguishes holders.

    work/<key>/lease        flock by the executor for the whole stage: {"token", "id", "host", "pid", "run", "released"}
    work/<key>/ranks        flock, shared, by every process of the stage for its life
    work/<key>/out-<attempt>    what becomes the artifact; no other attempt writes there
    work/<key>/state        what the op keeps between attempts
    work/<key>/ended.json, commit.json      see commit_journal.py, artifact_store.py
    work/<key>/job-<attempt>.json, results-<attempt>/       see launchers/stage_contract.py
    work/<key>/private-<attempt>/           mode 0700: where ranks on one host meet, see launchers/host_run.py
    work/<key>/mark-<32 hex digits>         how processes of a stage are found, see system/stage_mark.py
    work/<key>/code-<attempt>.json          the source files that the stage runs, see scheduler/task.py
    work/<key>/actors-<attempt>.json        what runs on a Ray cluster, see launchers/ray_backend.py
    work/<key>.<id>/            work whose input data changed, see scheduler/attempt.py

A new holder ends what stages left running, see system/stage_mark.py, and waits until nobody holds `ranks`, so no late
writer of a killed run can be alive beside it. A process that comes to `ranks` later finds another token in `lease`, and
ends. Tokens count the holders of one work folder, and restart with it; the id is unique to a holder. No clock decides
who comes first.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import attrs
from attrs import frozen

from dsl.errors import LeaseLost, StageError, StopRequested, StoreError
from dsl.files import (
    NO_FILE,
    clear_errors,
    known_fields,
    open_own,
    open_plain,
    parsed_object,
    read_object_or_none,
    remove_link,
)
from executor.store.names import KEY, REMOVED_FROM_WORK
from executor.system.crash_points import fail_point
from executor.system.json_values import Check, fit, is_flag, is_text, is_whole
from executor.system.stage_mark import end_marked
from executor.system.symlinks import is_folder, remove, remove_links_out_of

KEPT = ("lease", "ranks")
NO_LEASE = "{} is not a lease of dflow but a folder or a pipe; remove it"
ACTORS = "actors-"
LATE_WRITERS_S = 60.0
POLL_S = 0.1


@frozen(kw_only=True)
class Holder:
    """The content of a lease file; the defaults for an empty or half written one."""

    token: int = 0
    id: str = ""
    host: str = ""
    pid: int = 0
    run: str = ""
    released: bool = False

    @classmethod
    def of(cls, text: bytes) -> Holder:
        found = parsed_object(text)
        return cls(**known_fields(cls, found)) if found is not None and fit(_CHECKS, found) else cls()

    @classmethod
    def read(cls, folder: Path) -> Holder:
        """Read the last holder of a work folder."""
        try:
            with open_plain(folder / "lease") as file:
                return cls.of(file.read())
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            return cls()

    @property
    def is_elsewhere(self) -> bool:
        """Whether a process on another host holds the lease, or ended without releasing it."""
        return self.host not in ("", os.uname().nodename) and not self.released

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (run {self.run})"


_CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("token", "pid"), is_whole),
    **dict.fromkeys(("id", "host", "run"), is_text),
    "released": is_flag,
}


class Lease:
    """The lease on the work folder of one key, which only one process can hold; leaving its context releases it."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.folder = folder
        self.token = 0
        self.id = ""
        self.last_run: str | None = None
        self._run_id = run_id
        self._descriptor: int | None = None
        self._given_up = threading.Event()

    @property
    def out_dir(self) -> Path:
        return self.path("out")

    @property
    def work_dir(self) -> Path:
        return self.folder / "state"

    def path(self, kind: str, suffix: str = "") -> Path:
        """A file or folder in the work folder that belongs to this attempt only."""
        return self.folder / f"{kind}-{self.token}-{self.id[:8]}{suffix}"

    def try_acquire(self) -> bool:
        """Take the lease; False if another process of this host holds it.

        Raises LeaseLost if a process of another host took it and never released it: whether that process still runs
        cannot be known here.
        """
        with clear_errors(self.folder):
            remove_link(self.folder)
            with suppress(FileExistsError):  # exist_ok would look again, when the holder may just have renamed it
                self.folder.mkdir(parents=True)
            return self._try_acquire()

    def holder_text(self) -> str:
        """The holder in the lease file, as text; empty if the file names none."""
        holder = Holder.read(self.folder)
        return f"{holder} works on it" if holder.host else ""

    def acquire(self, on_wait: Callable[[str], None]) -> None:
        """Wait until the lease is free, and take it. on_wait: called with one line about the holder."""
        is_reported = False
        while not self.try_acquire():
            if not is_reported and (holder := self.holder_text()):
                on_wait(holder)
                is_reported = True
            time.sleep(POLL_S)

    def wait_for_ranks(self) -> None:
        """Return when no process of a stage in this folder is alive. Raises LeaseLost after a minute.

        Processes on this machine are ended: the caller has no running stage.
        """
        end_marked(self.folder)
        deadline = time.monotonic() + LATE_WRITERS_S
        descriptor = open_own(self.folder / "ranks", os.O_RDWR | os.O_CREAT)
        try:
            while not _try_lock(descriptor):
                if time.monotonic() > deadline:
                    pids = ", ".join(map(str, lock_holders(self.folder / "ranks"))) or "unknown"
                    raise LeaseLost(
                        f"{self.folder}: processes of an earlier attempt still run there (process ids {pids}); end them"
                    )
                self.go_on()
                time.sleep(POLL_S)
        finally:
            os.close(descriptor)

    def give_up(self) -> None:
        """Let long work under this lease in another thread end with StopRequested."""
        self._given_up.set()

    def go_on(self) -> None:
        """Raise StopRequested if the lease was given up. Called now and then by long work."""
        if self._given_up.is_set():
            raise StopRequested(f"{self.folder}: the run was stopped; the next one continues here")

    def continue_from(self, key_without_code: str, recover: Callable[[Path], None] = lambda folder: None) -> str | None:
        """Move the op's state here from the newest work folder that has this key in work.json and no holder.

        recover: as Backends.recover. Returns the run that left the state there, None if there is none. This folder's
        own state must be empty.
        """
        others = [
            path
            for path in self.folder.parent.iterdir()
            if path != self.folder and KEY.fullmatch(path.name) and is_folder(path)
        ]
        for folder in sorted(others, key=_started, reverse=True):
            if (read_object_or_none(folder / "work.json") or {}).get("key_without_code") != key_without_code:
                continue
            with Lease(folder, self._run_id) as other:
                if not (is_folder(other.work_dir) and other._try_acquire_quietly()):
                    continue
                try:
                    recover(folder)
                except (LeaseLost, StageError):
                    continue
                remove(self.work_dir)
                fail_point("lease:adopting")
                other.work_dir.rename(self.work_dir)
                with suppress(FileNotFoundError):
                    (folder / "work.json").replace(self.folder / "work.json")
                fail_point("lease:adopted")
                self.last_run = other.last_run
                other.remove()
                return self.last_run
        return None

    def check(self) -> None:
        """Check that the folder is still the leased one, with this holder's token and id. Raises LeaseLost."""
        if self._descriptor is None or not _same_file(self._descriptor, self.folder / "lease"):
            raise LeaseLost(f"{self.folder}: the work folder was removed or replaced while the stage ran")
        holder = self._holder()
        if (holder.token, holder.id) != (self.token, self.id):
            raise LeaseLost(f"{self.folder}: another process has the lease")

    def empty(self, *, keep_state: bool) -> None:
        """Remove the files of earlier attempts, and the op's own state unless keep_state.

        Links in the state that lead out of the folder are removed, so that the op writes nothing outside.
        """
        with clear_errors(self.folder):
            for path in self.folder.iterdir():
                if path.name in KEPT or (keep_state and path == self.work_dir and is_folder(path)):
                    continue
                remove(path)
                fail_point("lease:clearing")
            remove_links_out_of(self.work_dir)
            self.out_dir.mkdir()
            self.work_dir.mkdir(exist_ok=True)
        fail_point("lease:emptied")

    def remove(self) -> None:
        """Remove the whole work folder after a commit; a process that waits for the lease gets a new, empty one."""
        gone = self.folder.with_name(f".{self.folder.name}.{self.id}")
        with clear_errors(self.folder):
            self.folder.rename(gone)
        fail_point("lease:removing")
        self._drop()
        fail_point("lease:released")
        remove(gone, ignore_errors=True)  # a store that is being opened may help: remove_leftovers

    def set_aside(self) -> Path:
        """Release the lease, and keep the work folder under another name that no key and no `continue_from` finds."""
        kept = self.folder.with_name(f"{self.folder.name}.{self.id[:8]}")
        with clear_errors(self.folder):
            self.folder.rename(kept)
        self.release()
        return kept

    def release(self) -> None:
        """Release the lease's lock, which works on this machine only, and note that in the file for other hosts."""
        if self._descriptor is None:
            return
        with suppress(StoreError):
            self._write(attrs.evolve(self._holder(), released=True))
        self._drop()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _try_acquire(self) -> bool:
        self._descriptor = self._open_locked()
        if self._descriptor is None:
            return False
        try:
            fail_point("lease:locked")
            self._take_over()
        except BaseException:
            self._drop()
            raise
        fail_point("lease:taken")
        return True

    def _try_acquire_quietly(self) -> bool:
        """Take the lease; False if another process or host has it, or a process of an earlier attempt is alive."""
        try:
            if not self._try_acquire():
                return False
            self.wait_for_ranks()
        except LeaseLost:
            return False
        return True

    def _open_locked(self) -> int | None:
        """Open and lock the current lease file; returns the descriptor, or None if another process holds it.

        Raises StoreError where something else is in its place.
        """
        path = self.folder / "lease"
        try:
            descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # the holder committed, and removed the folder just now
            return None
        except IsADirectoryError:
            raise StoreError(NO_LEASE.format(path)) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise StoreError(NO_LEASE.format(path))
        if _try_lock(descriptor) and _same_file(descriptor, self.folder / "lease"):
            return descriptor
        os.close(descriptor)
        return None

    def _take_over(self) -> None:
        last = self._holder()
        if last.is_elsewhere:
            raise LeaseLost(
                f"{self.folder}: leased by {last}, which did not release it; when nothing runs there any more, remove "
                f"{self.folder / 'lease'}"
            )
        self.token, self.id, self.last_run = last.token + 1, os.urandom(16).hex(), last.run or None
        host, pid = os.uname().nodename, os.getpid()
        self._write(Holder(token=self.token, id=self.id, host=host, pid=pid, run=self._run_id))

    def _drop(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _holder(self) -> Holder:
        """Read the holder in the locked lease file."""
        assert self._descriptor is not None
        return Holder.of(os.pread(self._descriptor, 65536, 0))

    def _write(self, holder: Holder) -> None:
        assert self._descriptor is not None
        text = json.dumps(attrs.asdict(holder)).encode() + b"\n"
        with clear_errors(self.folder / "lease"):
            if os.pwrite(self._descriptor, text, 0) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(self._descriptor, len(text))
            os.fsync(self._descriptor)  # other hosts of a shared file system see it from now on


def remove_leftovers(work: Path) -> None:
    """Remove the folders that `Lease.remove` had renamed when its process was killed."""
    for path in work.iterdir():
        if REMOVED_FROM_WORK.fullmatch(path.name):
            remove(path, ignore_errors=True)


def move_away(folder: Path) -> Path | None:
    """Rename a work folder without a holder, to be removed; None if it has one."""
    with Lease(folder, "gc") as lease:
        if current_holder(folder) or written_from_elsewhere(folder) or not lease._try_acquire_quietly():
            return None
        gone = folder.with_name(f".{folder.name}.{lease.id}")
        with clear_errors(folder):
            folder.rename(gone)
        lease._drop()
        return gone


def written_from_elsewhere(folder: Path) -> bool:
    """Whether a process of another machine may still write to a work folder; the next attempt finds out."""
    return any(folder.glob(f"{ACTORS}*"))


def current_holder(folder: Path) -> str:
    """The holder of a work folder, as text, found without taking the lease; "" if there is none."""
    lease = Lease(folder, "")
    if any(_is_locked(folder / name) for name in KEPT):
        return lease.holder_text() or "a process works on it"
    return lease.holder_text() if Holder.read(folder).is_elsewhere else ""


def share_ranks(folder: Path, token: int, lease_id: str) -> int:
    """Mark this process of a stage, for its life, as a writer to the work folder. Returns the locked descriptor.

    Raises LeaseLost if another holder has the lease by now, and FileNotFoundError if the work folder is gone.
    """
    descriptor = open_own(folder / "ranks", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    holder = Holder.read(folder)
    if (holder.token, holder.id) != (token, lease_id):
        os.close(descriptor)
        raise LeaseLost(f"{folder}: the lease passed to another attempt")
    return descriptor


def lock_holders(path: Path) -> list[int]:
    """Process ids on this machine that the kernel lists as holders of a lock on a file."""
    try:
        inode = path.stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines if "->" not in line]
    return sorted({int(row[4]) for row in rows if row[5].rpartition(":")[2] == str(inode)})


def _started(folder: Path) -> float:
    try:
        return (folder / "work.json").stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return 0.0


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # does not wait for a pipe's writer
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False  # a link is no lock
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        at_path = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (mine.st_dev, mine.st_ino) == (at_path.st_dev, at_path.st_ino)
