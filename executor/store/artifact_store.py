"""The artifact store: a folder of committed artifacts by digest, and an index from keys to digests.

<store>/format                  version of this layout
<store>/.id                     tells it from another store at its place, see system/trust.py
<store>/objects/<digest>/       an artifact's files and manifest.json, never changed after commit
<store>/index/<key>             append-only lines; the newest wins
<store>/work/<key>/             work in progress of one stage, see lease.py
<store>/records/<run id>/       what a run did, see records/run_record.py
<store>/mlflow.db, mlartifacts  see tracking/mlflow_client.py
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from dsl.artifact_digest import MANIFEST
from dsl.errors import StageError, StoreError
from dsl.files import (
    append_line,
    clear_error,
    clear_errors,
    read_json_or_none,
    read_lines,
    read_object_or_none,
    sync,
    write_json,
)
from executor.store.commit_journal import NOTE, PendingCommit
from executor.store.digests import FileEntry, altered_files, artifact_digest, seal_artifact_files
from executor.store.lease import Lease, remove_leftovers
from executor.store.manifest import IndexLine, Manifest, committed_files, keep_own_files
from executor.store.names import DIGEST, OUT, RUN
from executor.system.crash_points import fail_point
from executor.system.file_locks import LOCK, is_exclusive, shared_gc_lock
from executor.system.stamps import SeenStamps, stamps_of
from executor.system.symlinks import plain_status, refuse_links, remove
from executor.system.trust import trust_new_store
from executor.system.user_cache import user_cache

FORMAT = 3  # of the layout: other versions are refused
COMMIT = "commit.json"
FOLDERS = ("objects", "index", "work", "records")
SMOKE = "smoke"  # the store of `dflow run --smoke`
NO_LINKS = (*FOLDERS, SMOKE, "format", LOCK, "mlflow.lock")
KEPT_BY_GIT = "README.md"  # in a folder that has no other file yet
PRIVATE = 0o700  # prompts and answers are in logs, events, reports and mlflow.db
PROJECT_MARKS = ("pyproject.toml", ".git")


def store_path(given: str | None, pipeline_file: Path | None) -> Path:
    """The store's folder: `given` (--store), else DFLOW_STORE, else runs/ in the project's root.

    The root is the nearest folder with a pyproject.toml or .git at or above the pipeline file, else that file's own
    folder. Without a file the search starts at the working directory.
    """
    named = given or os.environ.get("DFLOW_STORE")
    if named:
        return _without_dots(Path(named).absolute())
    start = _without_dots(pipeline_file.absolute().parent) if pipeline_file is not None else Path.cwd()
    for folder in (start, *start.parents):
        if any((folder / mark).exists() for mark in PROJECT_MARKS):
            return folder / "runs"
    return start / "runs"


def _without_dots(path: Path) -> Path:
    """A folder's path without "..", resolved as the file system does, since ".." after a link leads elsewhere."""
    return path.resolve() if ".." in path.parts else path


class Store:
    """A store on disk. `Store.open` for reading works without a store: it is then empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._objects = path / "objects"
        self._index = path / "index"
        self._intact: set[str] = set()

    @classmethod
    def open(cls, path: Path, *, write: bool) -> Store:
        """Open a store. write: also for writing.

        Raises StoreError if the store is newer than this program, cannot be written, or has no working locks. It does
        so too where one of its folders is a link, whose target does not belong to the store.
        """
        refuse_links(
            (path / name for name in NO_LINKS),
            f"replace the link by its target, or move all of {path} and link that",
        )
        _check_format(path)
        store = cls(path)
        if write:
            store._make()
        return store

    @property
    def records(self) -> Path:
        return self.path / "records"

    @cached_property
    def memos(self) -> Path | None:
        """The folder for cached digests of this store, in the user's own cache; None where there is no such cache.

        Others who can write to the store cannot forge them there.
        """
        return user_cache("stores", hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:16])

    @property
    def external_memo(self) -> Path | None:
        """The memo file for digests of external inputs; None without a cache folder."""
        return self.memos / "external.jsonl" if self.memos is not None else None

    def object_path(self, digest: str) -> Path:
        return self._objects / digest

    def manifest(self, digest: str) -> Manifest | None:
        """The manifest of an artifact; None if a file of it is missing or has another size."""
        folder = self.object_path(digest)
        manifest = Manifest.of(folder)
        return manifest if manifest is not None and _is_intact(folder, manifest.files) else None

    def has(self, digest: str) -> bool:
        """Whether the artifact exists and none of its files is missing or has another size."""
        if digest not in self._intact and self._is_whole(digest):
            self._intact.add(digest)
        return digest in self._intact

    def _is_whole(self, digest: str) -> bool:
        folder = self.object_path(digest)
        files = committed_files(folder)
        return files is not None and _is_intact(folder, files)

    def files(self, digest: str) -> list[str]:
        """The names of all files in an artifact's folder, including links and files that its manifest does not list."""
        folder = self.object_path(digest)
        found = (Path(here, name) for here, folders, names in os.walk(folder) for name in (*folders, *names))
        return [path.relative_to(folder).as_posix() for path in found if path.is_symlink() or not path.is_dir()]

    def forget(self, digest: str) -> None:
        """Check the artifact again at the next call of `has`."""
        self._intact.discard(digest)

    def altered(self, digest: str) -> list[str]:
        """The names of the artifact's files that are missing or altered, found by reading; a missing
        manifest counts.
        """
        files = committed_files(self.object_path(digest))
        return [MANIFEST] if files is None else altered_files(self.object_path(digest), files)

    def index(self, key: str) -> list[IndexLine]:
        """All index lines of a key, oldest first."""
        lines = read_lines(self._index / key)
        return [entry for line in lines if (entry := IndexLine.from_json(line)) is not None]

    def newest(self, key: str) -> IndexLine | None:
        """The newest index line of a key, even if its artifact is gone."""
        lines = self.index(key)
        return lines[-1] if lines else None

    def computed_key(self, run: str | None, key: str | None) -> str | None:
        """The key under which a run computed this key's artifact; another key if the artifact was accepted."""
        seen: set[str] = set()
        while run is not None and key is not None and key not in seen:
            seen.add(key)
            lines = [line for line in self.index(key) if line.run == run]
            key = (lines[-1].accepted_key if lines else "") or key
        return key

    def accept(self, key: str, line: IndexLine) -> None:
        """Add an index line by which an artifact computed for another key is valid for this one."""
        with shared_gc_lock(self.path):
            self._append(key, line)

    def lease(self, key: str, run_id: str) -> Lease:
        return Lease(self.path / "work" / key, run_id)

    def commit(self, lease: Lease, manifest: Manifest, line: IndexLine) -> str:
        """Turn a finished stage's out_dir into an artifact, and return its digest; the work folder stays.

        Lease, files and digest are added to the manifest; digest and time to the index line. Raises StageError if the
        op wrote nothing or left links, and LeaseLost if the lease is gone.
        """
        lease.wait_for_ranks()
        lease.check()
        pending = PendingCommit(lease.out_dir, attrs.evolve(manifest, token=lease.token, lease=lease.id), line)
        with clear_errors(lease.folder):
            pending.write(lease.folder)
        fail_point("commit:waited")
        return self._commit(lease, pending)

    def _commit(self, lease: Lease, pending: PendingCommit) -> str:
        key = pending.manifest.key
        try:
            with clear_errors(lease.folder):
                digest = _seal(pending.out, pending.manifest, lease.go_on)
        except StageError:  # the stage's fault: it has to run again
            (lease.folder / NOTE).unlink()
            raise
        lease.check()
        entry = attrs.evolve(pending.line, digest=digest, time=time.time())
        keep_own_files(self.records / entry.run, key, pending.out)
        write_json(lease.folder / COMMIT, {**attrs.asdict(entry), "out": pending.out.name})
        self.place(pending.out, key, entry)
        return digest

    def place(self, sealed: Path, key: str, entry: IndexLine) -> None:
        """Make a folder the artifact of a key, by a rename and an index line.

        Its files and manifest are already on disk, and were read just now.
        """
        fail_point("commit:placing")
        with shared_gc_lock(self.path):
            self._place(sealed, entry.digest)
            self._append(key, entry)

    def finish_commit(self, lease: Lease, key: str) -> str | None:
        """Complete a commit during which the previous holder died or ran out of space.

        Returns the digest, or None if there was no such commit or its files are incomplete. Raises StopRequested if
        the attempt was given up.
        """
        lease.wait_for_ranks()
        journal = read_object_or_none(lease.folder / COMMIT)
        entry = IndexLine.from_json(journal) if journal is not None else None
        if journal is None or entry is None:
            pending = PendingCommit.read(lease.folder, key)
            return None if pending is None else self._commit(lease, pending)
        name = str(journal.get("out"))
        if not (OUT.fullmatch(name) and DIGEST.fullmatch(entry.digest) and RUN.fullmatch(entry.run)):
            return None
        out = lease.folder / name
        sealed = Manifest.of(out)
        is_whole = (
            sealed is not None and sealed.digest == entry.digest and not altered_files(out, sealed.files, lease.go_on)
        )
        with shared_gc_lock(self.path):
            if is_whole:
                self._place(out, entry.digest)
            if not self._is_whole(entry.digest):
                return None
            if entry not in self.index(key):
                self._append(key, entry)
        return entry.digest

    def _append(self, key: str, entry: IndexLine) -> None:
        append_line(self._index / key, entry.to_json(), durable=True)
        fail_point("commit:indexed")

    def _place(self, out: Path, digest: str) -> None:
        """Rename a finished out_dir into objects/, and remember the stamps of its files; equal content there is kept
        instead.
        """
        target = self.object_path(digest)
        with clear_errors(target):
            if not self.altered(digest):
                remove(out)
            else:
                SeenStamps(self.memos).add(digest, stamps_of(out, committed_files(out) or ()))
                self._replace(out, target, digest)
            fail_point("commit:renamed")
            sync(target.parent)
        self._intact.add(digest)
        fail_point("commit:placed")

    def _replace(self, out: Path, target: Path, digest: str) -> None:
        aside = out.with_name("altered")
        remove(aside)
        try:
            # Some of its files were lost or altered; the fresh ones replace it.
            if target.exists() or target.is_symlink():
                target.rename(aside)
                fail_point("commit:aside")
            out.rename(target)
        except OSError:
            if not self._is_whole(digest):
                raise
            remove(out)  # another key's stage with the same content was faster

    def _make(self) -> None:
        try:
            self.path.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        except FileExistsError as error:  # a broken link
            raise StoreError(f"{self.path}: this link, or one above it, is broken; create its target folder") from error
        except FileNotFoundError as error:  # where no folder can be created at all, as below /proc
            raise StoreError(f"{self.path}: the folder cannot be created; choose another --store") from error
        except OSError as error:
            raise clear_error(error, self.path) from error
        with clear_errors(self.path):
            # First: a folder without it is not recognised as a store, and an older dflow refuses it by its number.
            if read_json_or_none(self.path / "format") != FORMAT:
                if (self.path / KEPT_BY_GIT).exists():  # by Git, whose modes are no choice of the user's
                    with suppress(PermissionError):  # it belongs to another user
                        self.path.chmod(PRIVATE)
                trust_new_store(self.path)  # first: who finds a store here has to find it trusted
                write_json(self.path / "format", FORMAT, durable=True)
            if not all((self.path / name).is_dir() for name in FOLDERS):
                for name in FOLDERS:
                    (self.path / name).mkdir(exist_ok=True)
                sync(self.path)
                sync(self.path.parent)
            _check_locks(self.path)
            remove_leftovers(self.path / "work")


def _seal(out: Path, manifest: Manifest, go_on: Callable[[], None]) -> str:
    """Sync out_dir with its manifest to disk, and return its digest."""
    files = seal_artifact_files(out, go_on)
    if not files:
        raise StageError("the op wrote nothing to stage.out_dir, so there is no artifact")
    if MANIFEST in files:
        raise StageError(f"the op wrote {MANIFEST}, a name that the store keeps for itself")
    fail_point("commit:hashed")
    digest = artifact_digest(files)
    attrs.evolve(manifest, digest=digest, files=files).write(out)
    (out / MANIFEST).chmod(0o444)
    fail_point("commit:manifest")
    sync(out)
    fail_point("commit:synced")
    return digest


def _check_format(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path} is not a folder; a store is a folder that dflow creates")
    version = _version(path)
    if version is None and (mistake := _store_mistake(path)):
        version = _version(path)  # the first file of a store that another process made meanwhile
        if version is None:
            raise StoreError(mistake)
    if version not in (None, FORMAT):
        raise StoreError(
            f"{path}: the store has layout {version}, this version of dflow uses layout {FORMAT}; "
            "choose another --store, or use the version of dflow that made it"
        )


def _version(path: Path) -> Any:
    try:
        return read_json_or_none(path / "format")
    except ValueError as error:
        raise StoreError(f"{path}: this is not a store of dflow (its file `format` holds no number)") from error


def _store_mistake(path: Path) -> str:
    """A text on why a folder without a `format` file cannot become a store; empty if it can."""
    if (path / "objects").exists():
        return f"{path}: the store has no file `format`; it was damaged, or it is not a store of dflow"
    others = path.iterdir() if path.is_dir() else ()
    if any(not file.name.startswith((".", "format")) and file.name != KEPT_BY_GIT for file in others):
        return f"{path} holds other files and is not a dflow store; choose another --store"
    return ""


def _check_locks(path: Path) -> None:
    """Check that flock works and keeps a second holder out. Raises StoreError."""
    # The second by the first: another process that makes the store may replace the file in between.
    with (path / "format").open("r+b") as first, Path(f"/proc/self/fd/{first.fileno()}").open("r+b") as second:
        try:
            if is_exclusive(first, second):
                return
        except OSError as error:
            raise StoreError(f"{path}: locks (flock) do not work on this file system ({error.strerror})") from error
    raise StoreError(f"{path}: locks (flock) are not exclusive on this file system; put the store on another one")


def _is_intact(folder: Path, files: Mapping[str, FileEntry]) -> bool:
    for name, entry in files.items():
        try:
            size = plain_status(folder, name).st_size
        except OSError:
            return False
        if size != entry.size:
            return False
    return True
