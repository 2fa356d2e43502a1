"""`dflow gc`: remove what no kept run uses, in an order in which a kill at any moment leaves a consistent store.

Under the store's lock (store/gc_lock.py) it finds what is in use, drops the index lines of everything else, and renames
that: artifacts to objects/.gone-<digest>, work folders as store/lease.py does. The
renamed folders are removed last; the next gc removes those that a killed one did not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from dsl.errors import StoreError
from dsl.files import replace_file
from dsl.json_files import compact, read_lines, read_object
from dsl.os_errors import clear_errors
from executor.maintenance.retention import InUse, Kept, all_records, in_use, kept_runs, read_index
from executor.store.artifact_store import Store
from executor.store.gc_lock import exclusive_gc_lock
from executor.store.integrity import VERIFIED
from executor.store.lease import Holder, current_holder, move_away, written_from_elsewhere
from executor.store.manifest import Manifest
from executor.store.names import DAMAGED, DIGEST, GONE, IN_OBJECTS, IN_WORK, REMOVED_FROM_WORK
from executor.store.seen_stamps import SEEN
from executor.system.crash_points import fail_point
from executor.system.disk_space import folder_size
from executor.system.output import shown_digest
from executor.system.symlinks import is_folder, remove

Kind = Literal["artifact", "work", "leftover"]
KEEP = 10  # finished runs of each pipeline, where the user gives no number


@frozen
class Item:
    """An item in the store. size: bytes. label: what it is. why: why it stays; empty where it goes."""

    path: Path
    kind: Kind
    size: int
    label: str
    why: str = ""


@frozen
class Survey:
    """What would go and what stays. dropped: the digests whose index lines go, by key."""

    goes: tuple[Item, ...]
    stays: tuple[Item, ...]
    kept: tuple[Kept, ...]
    dropped: Mapping[str, Sequence[str]]

    @property
    def freed(self) -> int:
        """Bytes."""
        return sum(item.size for item in self.goes)


def survey(store: Store, *, keep: int, pulled: bool = True) -> Survey:
    """Find what `collect` would remove. keep: number of runs per pipeline; pulled: keep unused pulled artifacts.

    Raises StoreError where a record cannot be read.
    """
    # Listed before the records, so that artifacts committed meanwhile are not included.
    objects = _own(store.path / "objects", IN_OBJECTS)
    records = all_records(store.records)
    kept = kept_runs(records, keep)
    index = read_index(store)
    use = in_use(store, records, kept, index, pulled=pulled)
    items = [*_artifacts(objects, use), *_work(store, use)]
    digests = {key: [line.digest for line in lines if line.digest not in use.digests] for key, lines in index.items()}
    return Survey(
        goes=tuple(item for item in items if not item.why),
        stays=tuple(item for item in items if item.why),
        kept=tuple(kept),
        dropped={key: gone for key, gone in digests.items() if gone},
    )


def collect(store: Store, *, keep: int, pulled: bool = True) -> Survey:
    """Remove what `survey` finds, and return it. Raises StoreError where something cannot be removed."""
    with exclusive_gc_lock(store.path):
        found = survey(store, keep=keep, pulled=pulled)
        for key, digests in found.dropped.items():
            _shorten(store.path / "index" / key, set(digests))
        fail_point("gc:indexed")
        gone = [path for item in found.goes if (path := _hidden(item)) is not None]
        fail_point("gc:renamed")
    for path in gone:
        with clear_errors(path), suppress(FileNotFoundError):  # another gc is removing the same leftover
            remove(path)
        fail_point("gc:removed")
    if store.memos is not None:
        removed = {item.path.name for item in found.goes if item.kind == "artifact"}
        for name in (VERIFIED, SEEN):
            with suppress(OSError, StoreError):  # a memo only saves time
                _shorten(store.memos / name, removed)
    return found


def _own(path: Path, *names: re.Pattern[str]) -> list[Path]:
    """The entries of a folder with dflow's own names; dflow does not remove anything else."""
    found = path.iterdir() if path.is_dir() else ()
    own = (each for each in found if any(name.fullmatch(each.name) for name in names))
    return sorted(each for each in own if each.is_symlink() or is_folder(each))


def _artifacts(objects: Sequence[Path], use: InUse) -> Iterator[Item]:
    for folder in objects:
        if _is_leftover(folder):
            yield Item(folder, "leftover", folder_size(folder), _leftover_label(folder))
        else:
            why = use.digests.get(folder.name, "")
            yield Item(folder, "artifact", folder_size(folder), _artifact_label(folder), why)


def _work(store: Store, use: InUse) -> Iterator[Item]:
    for folder in _own(store.path / "work", IN_WORK, REMOVED_FROM_WORK):
        if folder.is_symlink():
            yield Item(folder, "leftover", folder_size(folder), "a link instead of a work folder")
            continue
        if REMOVED_FROM_WORK.fullmatch(folder.name):
            yield Item(folder, "leftover", folder_size(folder), "the rest of a removed work folder")
            continue
        run = Holder.read(folder).run or "?"
        node = (read_object(folder / "work.json") or {}).get("node") or shown_digest(folder.name)
        why = current_holder(folder)
        if not why and written_from_elsewhere(folder):
            why = "a stage on a Ray cluster may still write there; the next run of it finds out"
        if not why and (folder.name in use.unfinished_keys or run in use.unfinished_runs):
            why = f"unfinished work that `dflow resume {run}` continues"
        yield Item(folder, "work", folder_size(folder), f"unfinished work of {node}, run {run}", why)


def _is_leftover(folder: Path) -> bool:
    return folder.is_symlink() or DIGEST.fullmatch(folder.name) is None


def _leftover_label(folder: Path) -> str:
    if folder.is_symlink():
        return "a link instead of an artifact"
    return "a damaged artifact" if folder.name.endswith(DAMAGED) else "the rest of a removed artifact"


def _artifact_label(folder: Path) -> str:
    manifest = Manifest.of(folder)
    return "no manifest" if manifest is None else f"{manifest.node} ({manifest.op}), run {manifest.run}"


def _hidden(item: Item) -> Path | None:
    """Rename an item to a hidden name; None where it came into use meanwhile, or is gone."""
    if item.kind == "work":
        return move_away(item.path)
    if item.kind == "leftover":
        return item.path
    gone = item.path.with_name(f"{GONE}{item.path.name}-{os.getpid()}")
    with clear_errors(item.path):
        remove(gone)  # of a killed process that had the same id
        item.path.rename(gone)
    fail_point("gc:renaming")
    return gone


def _shorten(path: Path, digests: set[str]) -> None:
    """Drop the lines of these digests from a file of lines; an empty file is removed."""
    lines: list[dict[str, Any]] = read_lines(path)
    kept = [line for line in lines if line.get("digest") not in digests]
    if len(kept) == len(lines):
        return
    if kept:
        replace_file(path, b"".join(map(compact, kept)), durable=True)
        return
    with clear_errors(path):
        path.unlink()
