"""The store: its layout, its disk, whether locks and renames work there, its leases, and damaged artifacts; and MLflow:
whether the server answers, or whether the database matches the installed version.
"""

from __future__ import annotations

import base64
import importlib.util
import os
import re
import sqlite3
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dsl.errors import StoreError
from dsl.files import free_bytes
from dsl.finding import Finding
from dsl.shown import shown_bytes
from executor.store.artifact_store import Store
from executor.store.integrity import artifact_digests, check
from executor.store.lease import Holder, lock_holders
from executor.system.file_locks import is_exclusive
from executor.system.output import shown_digest

LITTLE_DISK = 20_000_000_000  # bytes; the checkpoint of a target with 8 billion parameters
REVISION = re.compile(r"^(down_)?revision\s*=\s*[\"'](\w+)[\"']", re.MULTILINE)
ANSWER_S = 5.0
SYNC_LATER = "runs continue without it; `dflow sync` sends the rest later"


def storage_findings(path: Path) -> Iterator[Finding]:
    """Check a store, its artifacts and its disk, and yield findings. path: the store's, which need not exist yet."""
    try:
        store = Store.open(path, write=False)
    except StoreError as error:
        yield Finding(str(error), level="fatal", code="store")
        return
    if (path / "format").exists():
        yield Finding(f"{path}, {len(artifact_digests(store))} artifacts", level="good", code="store")
    else:
        yield Finding(f"{path}: does not exist yet; the first run creates it", level="good", code="store")
    free = free_bytes(path)
    scarce = free < LITTLE_DISK
    message = f"{shown_bytes(free)} free at {path}"
    remedy = "checkpoints and features are large: see `dflow plan FILE` for sizes; --store DIR uses another disk"
    yield Finding(message, advice=remedy if scarce else "", level="warning" if scarce else "good", code="disk")
    yield _file_system(path)
    yield from _leases(path)
    damages = check(store, artifact_digests(store), sizes_only=True)
    if damages:
        message = f"{len(damages)} are damaged, such as {next(iter(damages.values()))[0]}"
        remedy = "`dflow doctor --verify` takes them out of use and shows what rebuilds them"
        yield Finding(message, advice=remedy, level="warning", code="artifacts")


def _file_system(path: Path) -> Finding:
    """A finding on whether the store's file system works, tested in a temporary folder."""
    place = next(here for here in (path, *path.parents) if here.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".dflow-doctor-", dir=place) as folder:
            faults = [*_faults(Path(folder))]
    except OSError as error:
        message = f"{place} cannot be written ({error.strerror})"
        return Finding(message, advice="--store DIR uses another folder", level="fatal", code="file system")
    if faults:
        message = f"at {place}: {'; '.join(faults)}"
        return Finding(message, advice="put the store on a local disk (--store DIR)", level="fatal", code="file system")
    return Finding(f"locks (flock), renames and fsync work at {place}", level="good", code="file system")


def _faults(folder: Path) -> Iterator[str]:
    """The file system operations that the store needs and that fail in this folder, as texts."""
    file = folder / "lock"
    file.write_text("old")
    with file.open("r+b") as first, file.open("r+b") as second:
        try:
            if not is_exclusive(first, second):
                yield "locks (flock) are not exclusive"
        except OSError as error:
            yield f"locks (flock) do not work ({error.strerror})"
    try:
        fresh = folder / "fresh"
        fresh.write_text("new")
        with fresh.open("rb") as opened:
            os.fsync(opened.fileno())
        fresh.replace(file)
        (folder / "work").mkdir()
        (folder / "work").rename(folder / "objects")
        if file.read_text() != "new":
            yield "a rename does not replace an existing file"
    except OSError as error:
        yield f"renames and fsync do not work ({error.strerror})"


def _leases(path: Path) -> Iterator[Finding]:
    """Findings on leases: the runs at work here, and leases that another host holds or never released.
    Locks nothing.
    """
    for lease in sorted((path / "work").glob("*/lease")):
        holder = Holder.read(lease.parent)
        key = shown_digest(lease.parent.name)
        if pids := lock_holders(lease):
            yield Finding(f"run {holder.run} works on {key} (process {pids[0]})", level="good", code="lease")
        elif holder.is_elsewhere:
            remedy = f"if nothing runs there any more, remove {lease}"
            yield Finding(f"{holder.host} (run {holder.run}) holds {key}", advice=remedy, level="warning", code="lease")


def tracking_findings(store: Path, uri: str | None) -> Iterator[Finding]:
    """Check the MLflow server or database, and yield findings.

    uri: from [mlflow] of a pipeline file, with secrets filled in; None for the database in the store.
    """
    uri = uri or f"sqlite:///{store / 'mlflow.db'}"
    scheme = urlsplit(uri).scheme
    if scheme in ("http", "https"):
        yield _server(uri)
    elif scheme == "sqlite":
        yield _database(Path(unquote(urlsplit(uri).path)[1:]))
    else:
        yield Finding(f"runs go to {scheme}; not checked", level="good", code="MLflow")


def _server(uri: str) -> Finding:
    """A finding on whether an MLflow server answers. A name and password in its address are sent as MLflow does."""
    parts = urlsplit(uri)
    user, _, place = parts.netloc.rpartition("@")
    shown = parts._replace(netloc=place).geturl()
    request = urllib.request.Request(f"{shown.rstrip('/')}/health")
    if user:
        request.add_header("Authorization", f"Basic {base64.b64encode(unquote(user).encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S):
            return Finding(f"{shown} answers", level="good", code="MLflow")
    except urllib.error.HTTPError as error:
        return Finding(
            f"{shown}/health answers with {error.code} {error.reason}",
            advice=SYNC_LATER,
            level="warning",
            code="MLflow",
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return Finding(f"{shown} cannot be reached: {reason}", advice=SYNC_LATER, level="warning", code="MLflow")


def _database(path: Path) -> Finding:
    """A finding on whether the installed MLflow can use its SQLite database, by the database's schema revision.

    Known revisions are read from MLflow's files, without importing it.
    """
    if not path.exists():
        return Finding(f"{path}: does not exist yet; the first run creates it", level="good", code="MLflow")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as opened:
            (row,) = opened.execute("SELECT version_num FROM alembic_version").fetchall()
    except (sqlite3.Error, ValueError) as error:
        message = f"{path} is not an MLflow database ({error})"
        return Finding(
            message,
            advice="move it away; the next `dflow sync --all` sends everything again",
            level="warning",
            code="MLflow",
        )
    known, newest = _revisions()
    if row[0] in newest:
        return Finding(f"{path} has the installed version", level="good", code="MLflow")
    if row[0] in known:
        return Finding(
            f"{path} has an older version",
            advice="the next run migrates it; back it up first",
            level="warning",
            code="MLflow",
        )
    message = f"{path} was written by a newer MLflow than the installed one"
    return Finding(message, advice="install that version, or move the database away", level="warning", code="MLflow")


def _revisions() -> tuple[set[str], set[str]]:
    """The database revisions that the installed MLflow knows, and the newest of them."""
    spec = importlib.util.find_spec("mlflow")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    known: set[str] = set()
    before: set[str] = set()
    for folder in folders:
        for file in Path(folder).glob("store/db_migrations/versions/*.py"):
            for is_before, revision in REVISION.findall(file.read_text("utf-8")):
                (before if is_before else known).add(revision)
    return known, known - before
