"""What is in use in a store: the artifacts and the unfinished work of kept runs.

Kept are the newest finished runs of every pipeline and all that started after them, tagged runs, and runs that are
in progress or being served. A kept run uses the artifacts of its nodes and of its keys; a run in progress
also earlier artifacts of its nodes, which it may still reuse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from dsl.errors import StoreError
from dsl.json_files import read_object
from executor.records.run_record import Record, RunState, is_begun, is_served
from executor.records.run_tags import tags_of
from executor.store.artifact_store import COMMIT, Store
from executor.store.index_line import IndexLine
from executor.store.names import KEY

ACCEPTED = "accepted"


@frozen
class Kept:
    """A run that is kept, and why: "one of the last 10 of toy", "tagged best", "it is running"."""

    record: Record
    why: str
    running: bool

    @property
    def unfinished(self) -> bool:
        return self.running or self.record.state.status != "done"


@frozen
class InUse:
    """digests: with a reason for each; the keys of nodes with unfinished work; the ids of unfinished runs."""

    digests: Mapping[str, str]
    unfinished_keys: frozenset[str]
    unfinished_runs: frozenset[str]


def all_records(records: Path, damaged: list[Path] | None = None) -> list[Record]:
    """Every run, the newest first. damaged: gets the folders of damaged records. Without it raises StoreError for the
    first, since what it uses is unknown.

    A record without a state is of a run that never started.
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
    """What the kept runs use, and accepted artifacts that no run has used yet. index: all lines by key.

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
        committed = read_object(folder) or {}
        if folder.parent.name in keys or committed.get("run") in runs:
            used.setdefault(str(committed.get("digest")), f"run {committed.get('run')}: it is being committed")
    return InUse(used, frozenset(filter(None, keys)), runs)


def read_index(store: Store) -> dict[str, list[IndexLine]]:
    """All lines of the index by key."""
    folder = store.path / "index"
    found = folder.iterdir() if folder.is_dir() else ()
    keys = sorted(path.name for path in found if KEY.fullmatch(path.name) and path.is_file())
    return {key: store.index(key) for key in keys}


def _digests(run: Kept, records: Sequence[Record], index: Mapping[str, Sequence[IndexLine]]) -> Iterator[str]:
    """The artifacts of one run's nodes, and those that it may reuse."""
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
    """The last artifacts of a pipeline's nodes: a node downstream of one that reruns may reuse its own."""
    found: dict[str, str] = {}
    for record in records:
        if record.state.pipeline == state.pipeline:
            for node_id, node in record.state.nodes.items():
                if node_id in state.nodes and node.digest is not None:
                    found.setdefault(node_id, node.digest)
    return found
