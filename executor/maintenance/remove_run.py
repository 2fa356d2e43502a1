"""`dflow rm`: remove a run from the store. Its artifacts stay until `dflow gc` finds them unused."""

from __future__ import annotations

from pathlib import Path

from dsl.errors import StoreError
from dsl.os_errors import clear_errors
from executor.records.run_record import Record, RunState, is_served
from executor.records.run_tags import tags_of
from executor.store.artifact_store import Store
from executor.store.gc_lock import exclusive_gc_lock
from executor.store.names import RUN_ID
from executor.system.crash_points import fail_point
from executor.system.symlinks import is_folder, links_in, remove


def remove_run(store: Store, folder: Path) -> None:
    """Remove a run's record, logs and figures, also where the record is damaged.

    It is renamed out of its place first; the remains of a killed removal are deleted when the store is next opened.
    Where the record is a link, only the link is removed.
    Raises StoreError where the run is in progress, being served, or tagged.
    """
    record = Record(folder, RunState(run=folder.name, pipeline="", experiment=""))  # its content does not matter
    with exclusive_gc_lock(store.path), clear_errors(folder):
        if RUN_ID.fullmatch(folder.name) is None:
            raise StoreError(f"{folder}: not a record of a run, so it is not removed")
        if folder.is_symlink():
            folder.unlink()
            return
        if not is_folder(folder):
            raise StoreError(f"run {folder.name} no longer exists")
        require_untagged(folder)
        if is_served(folder):
            raise StoreError(f"run {folder.name} is being served; stop that first")
        for link in links_in(folder):
            link.unlink()
        record.lock()
        gone = store.path / "work" / f".{folder.name}"
        folder.rename(gone)
    fail_point("rm:renamed")
    remove(gone, ignore_errors=True)
    record.unlock()


def require_untagged(folder: Path) -> None:
    """Raises StoreError where the run has a tag."""
    tags = tags_of(folder)
    if tags:
        raise StoreError(
            f"run {folder.name} is tagged {', '.join(tags)}; to remove it, first remove the tag: "
            f"dflow tag {folder.name} {tags[0]} --remove"
        )
