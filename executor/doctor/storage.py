"""The store: its layout, its disk, whether locks and renames work there, who works in it, and what was damaged."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dsl.errors import StoreError
from dsl.sizes import shown_bytes
from executor.doctor.finding import Finding
from executor.planning.estimates import free_bytes
from executor.store.artifact_store import Store
from executor.store.integrity import check, committed
from executor.store.lease import lock_holders
from executor.system.file_locks import keeps_others_out
from executor.system.jsonlines import read_object

LITTLE_DISK = 20_000_000_000  # bytes; the checkpoint of a target of 8 billion parameters


def storage_findings(path: Path) -> Iterator[Finding]:
    """path: of the store, which need not be there yet."""
    try:
        store = Store.open(path, write=False)
    except StoreError as error:
        yield Finding("store", "missing", str(error), is_fatal=True)
        return
    if (path / "format").exists():
        yield Finding("store", "ok", f"{path}, {len(committed(store))} artifacts")
    else:
        yield Finding("store", "ok", f"{path}: not there yet, the first run makes it")
    free = free_bytes(path)
    scarce = free < LITTLE_DISK
    told = f"{shown_bytes(free)} free at {path}"
    remedy = "checkpoints and features are large: `dflow plan FILE` tells how large, --store DIR names another disk"
    yield Finding("disk", "warning" if scarce else "ok", told, remedy if scarce else "")
    yield _file_system(path)
    yield from _leases(path)
    damages = check(store, committed(store), sizes_only=True)
    if damages:
        told = f"{len({damage.digest for damage in damages})} are damaged, such as {damages[0]}"
        yield Finding("artifacts", "warning", told, "`dflow verify` takes them out of use, and says what rebuilds them")


def _file_system(path: Path) -> Finding:
    """Tried in a folder of its own, which is removed again."""
    place = next(here for here in (path, *path.parents) if here.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".dflow-doctor-", dir=place) as folder:
            faults = [*_faults(Path(folder))]
    except OSError as error:
        told = f"{place} cannot be written ({error.strerror})"
        return Finding("file system", "missing", told, "--store DIR names another folder", is_fatal=True)
    if faults:
        told = f"at {place}: {'; '.join(faults)}"
        return Finding("file system", "missing", told, "put the store on a local disk (--store DIR)", is_fatal=True)
    return Finding("file system", "ok", f"locks (flock), renames and fsync work at {place}")


def _faults(folder: Path) -> Iterator[str]:
    """What of that which the store relies on does not work there."""
    file = folder / "lock"
    file.write_text("old")
    with file.open("r+b") as first, file.open("r+b") as second:
        try:
            if not keeps_others_out(first, second):
                yield "locks (flock) keep nobody out"
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
            yield "a rename does not replace the file that was there"
    except OSError as error:
        yield f"renames and fsync do not work ({error.strerror})"


def _leases(path: Path) -> Iterator[Finding]:
    """Who works here, and what another host holds or never gave back; nothing is locked to find out."""
    for lease in sorted((path / "work").glob("*/lease")):
        holder = read_object(lease) or {}
        run, host = holder.get("run"), holder.get("host")
        if pids := lock_holders(lease):
            yield Finding("lease", "ok", f"run {run} works on {lease.parent.name[:12]} (process {pids[0]})")
        elif host and host != socket.gethostname() and not holder.get("released"):
            remedy = f"when nothing runs there any more, remove {lease}"
            yield Finding("lease", "warning", f"{host} (run {run}) holds {lease.parent.name[:12]}", remedy)
