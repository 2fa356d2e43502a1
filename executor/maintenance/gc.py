"""What leaves a store: by `dflow gc` what no kept run uses, by `dflow rm` a run's record.

Kept are the newest finished runs of every pipeline and all that started after them, tagged runs, and runs that are
in progress or being served. A kept run uses the artifacts of its nodes and of its keys; a run in progress
also earlier artifacts of its nodes, which it may still reuse.

A kill at any moment leaves a consistent store: under the store's lock (system/file_locks.py), gc finds what is in use,
drops the index lines of everything else, and renames that: artifacts to objects/.gone-<digest>, work folders as
store/lease.py does. The renamed folders are removed last; the next gc removes those that a killed one did not.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from dsl.errors import StoreError
from dsl.files import clear_errors, compact, read_lines, read_object_or_none, replace_file
from executor.records.run_record import Record, RunState, is_begun, is_served
from executor.records.run_tags import tags_of
from executor.store.artifact_store import COMMIT, Store
from executor.store.integrity import VERIFIED
from executor.store.lease import Holder, current_holder, move_away, written_from_elsewhere
from executor.store.manifest import IndexLine, Manifest
from executor.store.names import DAMAGED, DIGEST, GONE, IN_OBJECTS, IN_WORK, KEY, REMOVED_FROM_WORK, RUN_ID
from executor.system.crash_points import fail_point
from executor.system.file_locks import exclusive_gc_lock
from executor.system.output import shown_digest
from executor.system.stamps import SEEN
from executor.system.symlinks import folder_size, is_folder, links_in, remove

Kind = Literal["artifact", "work", "leftover"]
KEEP = 10  # finished runs of each pipeline, where the user gives no number
ACCEPTED = "accepted"


@frozen
class Item:
    """A file or folder of the store. size: bytes. label: what it is. why: why gc keeps it; empty if gc removes it."""

    path: Path
    kind: Kind
    size: int
    label: str
    why: str = ""


@frozen
class Survey:
    """A survey of what gc would remove and keep. dropped: key -> digests whose index lines would be removed."""

    goes: tuple[Item, ...]
    stays: tuple[Item, ...]
    kept: tuple[Kept, ...]
    dropped: Mapping[str, Sequence[str]]

    @property
    def freed(self) -> int:
        """The bytes that would be freed."""
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
    """Remove what `survey` finds, and return the survey. Raises StoreError where something cannot be removed."""
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
        node = (read_object_or_none(folder / "work.json") or {}).get("node") or shown_digest(folder.name)
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
    """Rename an item to a hidden name before its removal; None where it is gone or has come into use."""
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
    """Drop the lines with these digests from an index file; an empty file is removed."""
    lines: list[dict[str, Any]] = read_lines(path)
    kept = [line for line in lines if line.get("digest") not in digests]
    if len(kept) == len(lines):
        return
    if kept:
        replace_file(path, b"".join(map(compact, kept)), durable=True)
        return
    with clear_errors(path):
        path.unlink()


@frozen
class Kept:
    """A run that gc keeps, and the reason: "one of the last 10 of toy", "tagged best", "it is running"."""

    record: Record
    why: str
    running: bool

    @property
    def unfinished(self) -> bool:
        return self.running or self.record.state.status != "done"


@frozen
class InUse:
    """The things in use: digests of artifacts, each with a reason; keys with unfinished work; ids of
    unfinished runs.
    """

    digests: Mapping[str, str]
    unfinished_keys: frozenset[str]
    unfinished_runs: frozenset[str]


def all_records(records: Path, damaged: list[Path] | None = None) -> list[Record]:
    """All runs, the newest first.

    damaged: collects the folders of damaged records. Without it, the first damaged one raises StoreError, since its
    artifacts are unknown. A record without a state belongs to a run that never started.
    """
    folders = sorted(records.iterdir(), reverse=True) if records.is_dir() else []
    begun = [folder for folder in folders if is_begun(folder)]
    found = []
    for folder in begun:
        try:
            found.append(Record.load(folder))
        except StoreError as error:
            if damaged is not None:
                damaged.append(folder)
                continue
            raise StoreError(
                f"{folder}: the record cannot be read, so it is not known what it uses; "
                f"remove it with `dflow rm {folder.name}`"
            ) from error
    return found


def kept_runs(records: Sequence[Record], keep: int) -> list[Kept]:
    """The last `keep` runs of every pipeline, tagged runs and running ones. records: all, newest first.

    Only finished runs count, so that failures do not displace the last good run.
    """
    done: Counter[str] = Counter()
    found = []
    for record in records:
        pipeline = record.state.pipeline
        running = record.is_locked()
        tags = tags_of(record.folder)
        if running:
            found.append(Kept(record, "it is running, or being sent", running))
        elif is_served(record.folder):
            found.append(Kept(record, "it is being served", running))
        elif tags:
            found.append(Kept(record, f"tagged {', '.join(tags)}", running))
        elif done[pipeline] < keep:
            is_done = record.state.status == "done"
            why = f"one of the last {keep} of {pipeline}" if is_done else f"newer than the last {keep} of {pipeline}"
            found.append(Kept(record, why, running))
        done[pipeline] += record.state.status == "done"
    return found


def in_use(
    store: Store,
    records: Sequence[Record],
    kept: Sequence[Kept],
    index: Mapping[str, Sequence[IndexLine]],
    *,
    pulled: bool = True,
) -> InUse:
    """The artifacts and work that the kept runs use, and accepted artifacts not used yet. index: all lines by key.

    pulled: also keep pulled artifacts that no run has used yet.
    """
    used: dict[str, str] = {}
    for run in kept:
        reason = f"run {run.record.run}: {run.why}"
        for digest in _digests(run, records, index):
            used.setdefault(digest, reason)
    running = {run.record.run for run in kept if run.running}
    nodes = [node for record in records for node in record.state.nodes.values()]
    digests, keys_used = {node.digest for node in nodes}, {node.key for node in nodes}
    for key, lines in index.items():
        for line in lines:
            if line.run in running:
                used.setdefault(line.digest, f"run {line.run}: it is running")
            elif line.is_pulled and line.digest not in digests:
                if pulled:
                    used.setdefault(line.digest, "pulled, and no run has used it yet")
            elif line.acceptance == ACCEPTED and key not in keys_used:
                used.setdefault(line.digest, "accepted, and no run has used it yet")
    unfinished = [run.record for run in kept if run.unfinished]
    keys = {node.key for record in unfinished for node in record.state.nodes.values() if node.state != "done"}
    runs = frozenset(record.run for record in unfinished)
    for folder in store.path.glob(f"work/*/{COMMIT}"):  # the stage died while it committed: resuming completes that
        committed = read_object_or_none(folder) or {}
        if folder.parent.name in keys or committed.get("run") in runs:
            used.setdefault(str(committed.get("digest")), f"run {committed.get('run')}: it is being committed")
    return InUse(used, frozenset(filter(None, keys)), runs)


def read_index(store: Store) -> dict[str, list[IndexLine]]:
    """The lines of the index by key."""
    folder = store.path / "index"
    found = folder.iterdir() if folder.is_dir() else ()
    keys = sorted(path.name for path in found if KEY.fullmatch(path.name) and path.is_file())
    return {key: store.index(key) for key in keys}


def _digests(run: Kept, records: Sequence[Record], index: Mapping[str, Sequence[IndexLine]]) -> Iterator[str]:
    """The digests of the artifacts of one run's nodes, and of those that the run may still reuse."""
    state = run.record.state
    yield from (node.digest for node in state.nodes.values() if node.digest is not None)
    yield from state.pinned.values()
    keys = {node.key for node in state.nodes.values() if node.digest is None}
    if run.running:
        yield from _before(state, records).values()
    for key in keys:
        if key is not None and index.get(key):
            yield index[key][-1].digest


def _before(state: RunState, records: Sequence[Record]) -> dict[str, str]:
    """The last artifacts of a pipeline's nodes by id, which a running run may still reuse."""
    found: dict[str, str] = {}
    for record in records:
        if record.state.pipeline == state.pipeline:
            for node_id, node in record.state.nodes.items():
                if node_id in state.nodes and node.digest is not None:
                    found.setdefault(node_id, node.digest)
    return found


def remove_run(store: Store, folder: Path) -> None:
    """Remove a run's record, logs and figures, even if the record is damaged.

    The folder is renamed first; if the removal is killed, the rest is deleted when the store is next opened. Of a link
    only the link is removed.
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
    """Check that a run has no tag. Raises StoreError."""
    tags = tags_of(folder)
    if tags:
        raise StoreError(
            f"run {folder.name} is tagged {', '.join(tags)}; to remove it, first remove the tag: "
            f"dflow runs --untag {tags[0]}"
        )
