"""The store: its layout, its disk, whether locks and renames work there, its leases, and damaged artifacts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dsl.errors import StoreError
from dsl.finding import Finding
from dsl.os_errors import free_bytes
from dsl.sizes import shown_bytes
from executor.store.artifact_store import Store
from executor.store.integrity import artifact_digests, check
from executor.store.lease import Holder, lock_holders
from executor.system.file_locks import is_exclusive
from executor.system.output import shown_digest

LITTLE_DISK = 20_000_000_000  # bytes; the checkpoint of a target with 8 billion parameters


def storage_findings(path: Path) -> Iterator[Finding]:
    """path: of the store, which need not exist yet."""
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
    """Tested in a temporary folder."""
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
    """What does not work there of the operations that the store relies on."""
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
    """Which runs work here, and leases that another host holds or never released; locks nothing."""
    for lease in sorted((path / "work").glob("*/lease")):
        holder = Holder.read(lease.parent)
        key = shown_digest(lease.parent.name)
        if pids := lock_holders(lease):
            yield Finding(f"run {holder.run} works on {key} (process {pids[0]})", level="good", code="lease")
        elif holder.is_elsewhere:
            remedy = f"if nothing runs there any more, remove {lease}"
            yield Finding(f"{holder.host} (run {holder.run}) holds {key}", advice=remedy, level="warning", code="lease")
