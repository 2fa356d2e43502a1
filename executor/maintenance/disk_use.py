"""Disk use of a store in bytes: artifacts by pipeline, run and node, and the other folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from executor.maintenance.gc import all_records, survey
from executor.records.run_record import Record
from executor.records.run_tags import tags_of
from executor.store.artifact_store import SMOKE, Store
from executor.store.integrity import artifact_digests
from executor.system.symlinks import folder_size


@frozen
class NodeUse:
    """The disk use of one node in a run. runs: how many runs use its artifact."""

    node: str
    digest: str
    bytes: int
    runs: int


@frozen
class RunUse:
    """The disk use of one run. bytes: of its artifacts. only: of those that no other run uses. record: of
    its record.
    """

    run: str
    tags: Sequence[str]
    status: str
    bytes: int
    only: int
    record: int
    nodes: Sequence[NodeUse]


@frozen
class PipelineUse:
    pipeline: str
    bytes: int
    runs: Sequence[RunUse]


@frozen(kw_only=True)
class DiskUse:
    """The output of `dflow gc --usage --json`, in bytes.

    shared, unused: artifacts of several runs, and of none. damaged: unreadable records, which are not counted; if there
    are any, freed_by_gc is unknown.
    """

    store: str
    total: int
    artifacts: int
    shared: int
    unused: int
    freed_by_gc: int | None
    work: int
    records: int
    logs: int
    smoke: int
    mlflow: int
    damaged: Sequence[str]
    pipelines: Sequence[PipelineUse]


def disk_use(store: Store, keep: int) -> DiskUse:
    """Measure the disk use of a store. keep: as for the gc whose effect is estimated.

    An artifact counts once per run and per pipeline, however many nodes wrote it.
    """
    sizes = {digest: folder_size(store.object_path(digest)) for digest in artifact_digests(store)}
    damaged: list[Path] = []
    records = all_records(store.records, damaged)
    holders = Counter(digest for record in records for digest in _digests(record, sizes))
    pipelines = dict.fromkeys(record.state.pipeline for record in records)
    return DiskUse(
        store=str(store.path),
        total=folder_size(store.path.resolve()),
        artifacts=sum(sizes.values()),
        shared=sum(sizes[digest] for digest, runs in holders.items() if runs > 1),
        unused=sum(size for digest, size in sizes.items() if digest not in holders),
        freed_by_gc=None if damaged else survey(store, keep=keep).freed,
        damaged=list(map(str, damaged)),
        work=folder_size(store.path / "work"),
        records=folder_size(store.records),
        logs=sum(folder_size(path) for path in sorted(store.records.glob("*/*.log"))),
        smoke=folder_size(store.path / SMOKE),
        mlflow=sum(folder_size(path) for path in sorted(store.path.glob("ml*"))),
        pipelines=[
            _pipeline(name, [record for record in records if record.state.pipeline == name], sizes, holders)
            for name in pipelines
        ],
    )


def _pipeline(name: str, records: Sequence[Record], sizes: Mapping[str, int], holders: Counter[str]) -> PipelineUse:
    together = {digest for record in records for digest in _digests(record, sizes)}
    return PipelineUse(name, _sum(together, sizes), [_run(each, sizes, holders) for each in records])


def _run(record: Record, sizes: Mapping[str, int], holders: Counter[str]) -> RunUse:
    digests = _digests(record, sizes)
    return RunUse(
        record.run,
        tags_of(record.folder),
        record.state.status,
        _sum(digests, sizes),
        _sum((digest for digest in digests if holders[digest] == 1), sizes),
        folder_size(record.folder),
        [
            NodeUse(node_id, node.digest, sizes[node.digest], holders[node.digest])
            for node_id, node in record.state.nodes.items()
            if node.digest is not None and node.digest in sizes
        ],
    )


def _digests(record: Record, sizes: Mapping[str, int]) -> set[str]:
    """The run's artifacts that exist in the store."""
    return {node.digest for node in record.state.nodes.values() if node.digest is not None and node.digest in sizes}


def _sum(digests: Iterable[str], sizes: Mapping[str, int]) -> int:
    return sum(sizes[digest] for digest in digests)
