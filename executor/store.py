"""The artifact store: a folder of committed artifacts by digest, and an index from keys to digests.

<store>/format                  version of this layout
<store>/objects/<digest>/       an artifact's files and manifest.json, never changed after commit
<store>/index/<key>             append-only lines; the newest wins
<store>/work/<key>/             work in progress of one stage, see lease.py
<store>/records/<run id>/       what a run did, see record.py
<store>/external.jsonl          digests of external inputs
<store>/mlflow.db, mlartifacts  see track.py
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from dsl.errors import StageError, StoreError
from executor.content import MANIFEST, altered_files, artifact_digest, hash_artifact_files
from executor.jsonlines import append_line, read_json, read_lines, sync_folder, write_json
from executor.lease import Lease, remove_leftovers

FORMAT = 1
PROJECT_MARKS = ("pyproject.toml", ".git")


def store_path(given: str | None, pipeline_file: Path | None) -> Path:
    """Where the store lies: --store, else DFLOW_STORE, else runs/ in the project root.

    The project root is the nearest folder above the pipeline file (without one, above the working directory) that holds
    a pyproject.toml or .git, else that folder itself.
    """
    named = given or os.environ.get("DFLOW_STORE")
    if named:
        return Path(named).absolute()
    start = pipeline_file.absolute().parent if pipeline_file is not None else Path.cwd()
    for folder in (start, *start.parents):
        if any((folder / mark).exists() for mark in PROJECT_MARKS):
            return folder / "runs"
    return start / "runs"


@frozen
class IndexLine:
    """One line of the index: a run computed `digest` for the key. acceptance: "computed", or "forced" by --from."""

    digest: str
    run: str
    time: float
    neutral: Mapping[str, Any]
    acceptance: str


class Store:
    """A store on disk. `Store.open` for reading works without one: everything is then absent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._intact: set[str] = set()

    @classmethod
    def open(cls, path: Path, *, write: bool) -> Store:
        """Raises StoreError if the store is newer than this program, cannot be written, or has no working locks."""
        _check_format(path)
        store = cls(path)
        if write:
            store._make()
        return store

    @property
    def records(self) -> Path:
        return self.path / "records"

    @property
    def external_memo(self) -> Path | None:
        memo = self.path / "external.jsonl"
        return memo if self.path.is_dir() and os.access(self.path, os.W_OK) else None

    def object_path(self, digest: str) -> Path:
        return self.path / "objects" / digest

    def manifest(self, digest: str) -> dict[str, Any] | None:
        """The manifest of an artifact whose files are all there with their sizes, else None."""
        folder = self.object_path(digest)
        manifest: dict[str, Any] | None = read_json(folder / MANIFEST)
        return manifest if manifest is not None and _is_intact(folder, manifest) else None

    def has(self, digest: str) -> bool:
        """Whether the artifact is there and none of its files is missing or of another size."""
        if digest not in self._intact and self.manifest(digest) is not None:
            self._intact.add(digest)
        return digest in self._intact

    def forget(self, digest: str) -> None:
        """Look at the artifact anew when it is asked for the next time."""
        self._intact.discard(digest)

    def altered(self, digest: str) -> list[str]:
        """Names of the artifact's files that are gone or hold something else, by reading them; its manifest's too."""
        folder = self.object_path(digest)
        manifest: dict[str, Any] | None = read_json(folder / MANIFEST)
        return [MANIFEST] if manifest is None else altered_files(folder, manifest)

    def index(self, key: str) -> list[IndexLine]:
        """All that was ever computed for a key, oldest first."""
        return [IndexLine(**line) for line in read_lines(self.path / "index" / key)]

    def newest(self, key: str) -> str | None:
        """The digest that the key stands for, whether or not the artifact still is there."""
        lines = self.index(key)
        return lines[-1].digest if lines else None

    def lease(self, key: str, run_id: str) -> Lease:
        return Lease(self.path / "work" / key, run_id)

    def commit(self, lease: Lease, key: str, manifest: Mapping[str, Any], line: Mapping[str, Any]) -> str:
        """Turn a finished stage's out_dir into an artifact and return its digest; the work folder stays.

        The manifest gets the files and the digest, the index line ("run", "neutral", "acceptance") the digest and the
        time. Raises StageError if the op wrote nothing or left links, LeaseLost if the lease is gone.
        """
        lease.wait_for_ranks()
        out = lease.out_dir
        files = hash_artifact_files(out)
        if not files:
            raise StageError("the op wrote nothing to stage.out_dir, so there is no artifact")
        if MANIFEST in files:
            raise StageError(f"the op wrote {MANIFEST}, a name that the store keeps for itself")
        digest = artifact_digest(files)
        entries = {name: attrs.asdict(entry) for name, entry in files.items()}
        write_json(out / MANIFEST, {**manifest, "key": key, "token": lease.token, "digest": digest, "files": entries})
        for path in sorted(out.rglob("*"), reverse=True):
            if path.is_dir():
                sync_folder(path)
            else:
                path.chmod(0o444)
        with (out / MANIFEST).open("rb") as file:
            os.fsync(file.fileno())
        sync_folder(out)
        lease.check()
        self._place(out, digest)
        entry = IndexLine(digest=digest, time=time.time(), **line)
        append_line(self.path / "index" / key, attrs.asdict(entry), durable=True)
        return digest

    def _place(self, out: Path, digest: str) -> None:
        target = self.object_path(digest)
        if not self.altered(digest):  # the same content was there: it never changes
            shutil.rmtree(out)
            return
        altered = out.with_name("altered")
        shutil.rmtree(altered, ignore_errors=True)
        try:
            if target.exists():  # files of it were lost or altered; the fresh ones take its place
                target.rename(altered)
            out.rename(target)
        except OSError as error:
            if self.manifest(digest) is None:
                raise StoreError(f"{target}: cannot be placed in the store ({error.strerror})") from error
            shutil.rmtree(out)  # another key's stage with the same content was faster
        sync_folder(target.parent)

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # First of all: a folder without it is taken for something else.
            if not (self.path / "format").exists():
                write_json(self.path / "format", FORMAT)
            for name in ("objects", "index", "work", "records"):
                (self.path / name).mkdir(exist_ok=True)
            _check_locks(self.path)
            remove_leftovers(self.path / "work")
        except OSError as error:
            raise StoreError(
                f"{self.path}: the store cannot be written ({error.strerror}); name another by --store or DFLOW_STORE"
            ) from error


def _check_format(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path} is no folder; a store is a folder, which dflow makes itself")
    try:
        version = read_json(path / "format")
    except ValueError as error:
        raise StoreError(f"{path}: this is not a store of dflow (its file `format` holds no number)") from error
    if version is None and (path / "objects").exists():
        raise StoreError(f"{path}: the store has no file `format`; it was damaged, or it is not a store of dflow")
    if version is None and path.is_dir() and any(not file.name.startswith((".", "format")) for file in path.iterdir()):
        raise StoreError(f"{path} holds other files and is no store of dflow; choose another --store")
    if version is not None and (not isinstance(version, int) or version > FORMAT):
        raise StoreError(
            f"{path}: the store has layout {version}, this dflow knows up to {FORMAT}; "
            "use a newer dflow or another --store"
        )


def _check_locks(path: Path) -> None:
    """Raises StoreError where flock is missing or does not keep a second holder out."""
    with tempfile.NamedTemporaryFile(dir=path / "work", prefix=".locks.") as first:
        try:
            fcntl.flock(first.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(f"{path}: locks (flock) do not work on this file system ({error.strerror})") from error
        with Path(first.name).open() as second:
            try:
                fcntl.flock(second.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
    raise StoreError(f"{path}: locks (flock) keep nobody out on this file system; put the store on another one")


def _is_intact(folder: Path, manifest: Mapping[str, Any]) -> bool:
    for name, entry in manifest["files"].items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return False
        if size != entry["size"]:
            return False
    return True
