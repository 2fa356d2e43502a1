"""Disk use of a store in bytes: artifacts by pipeline, run and node, and the other folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from dsl.sizes import shown_bytes
from executor.maintenance.gc import survey
from executor.maintenance.retention import all_records
from executor.records.run_record import Record
from executor.records.run_tags import tags_of
from executor.store.artifact_store import Store
from executor.store.integrity import committed
from executor.system.disk_space import folder_size

SMALL = 100_000
SMOKE = "smoke"  # the store of `dflow run --smoke`


def disk_use(store: Store, keep: int) -> dict[str, Any]:
    """The output of `dflow du --json`. keep: as for the gc whose effect is estimated.

    An artifact counts once per run and per pipeline, however many nodes wrote it. only: bytes that no other run uses.
    """
    sizes = {digest: folder_size(store.object_path(digest)) for digest in committed(store)}
    records = all_records(store.records)
    holders = Counter(digest for record in records for digest in _digests(record, sizes))
    pipelines = dict.fromkeys(record.state.pipeline for record in records)
    return {
        "store": str(store.path),
        "total": folder_size(store.path.resolve()),
        "artifacts": sum(sizes.values()),
        "shared": sum(sizes[digest] for digest, runs in holders.items() if runs > 1),
        "unused": sum(size for digest, size in sizes.items() if digest not in holders),
        "freed_by_gc": survey(store, keep=keep).freed,
        "work": folder_size(store.path / "work"),
        "records": folder_size(store.records),
        "logs": sum(folder_size(path) for path in sorted(store.records.glob("*/*.log"))),
        "smoke": folder_size(store.path / SMOKE),
        "mlflow": sum(folder_size(path) for path in sorted(store.path.glob("ml*"))),
        "pipelines": [
            _pipeline(name, [record for record in records if record.state.pipeline == name], sizes, holders)
            for name in pipelines
        ],
    }


def shown_size(size: int) -> str:
    """`36.4 GB`, `2.7 MB`, `812 bytes`."""
    return f"{size:,} bytes" if size < SMALL else shown_bytes(size)


def _pipeline(name: str, records: Sequence[Record], sizes: dict[str, int], holders: Counter[str]) -> dict[str, Any]:
    together = {digest for record in records for digest in _digests(record, sizes)}
    return {"pipeline": name, "bytes": _sum(together, sizes), "runs": [_run(each, sizes, holders) for each in records]}


def _run(record: Record, sizes: dict[str, int], holders: Counter[str]) -> dict[str, Any]:
    digests = _digests(record, sizes)
    nodes = [
        {"node": node_id, "digest": node.digest, "bytes": sizes[node.digest], "runs": holders[node.digest]}
        for node_id, node in record.state.nodes.items()
        if node.digest in sizes
    ]
    return {
        "run": record.run,
        "tags": tags_of(record.folder),
        "status": record.state.status,
        "bytes": _sum(digests, sizes),
        "only": _sum((digest for digest in digests if holders[digest] == 1), sizes),
        "record": folder_size(record.folder),
        "nodes": nodes,
    }


def _digests(record: Record, sizes: dict[str, int]) -> set[str]:
    """The run's artifacts that exist in the store."""
    return {node.digest for node in record.state.nodes.values() if node.digest in sizes}


def _sum(digests: Iterable[str], sizes: dict[str, int]) -> int:
    return sum(sizes[digest] for digest in digests)
