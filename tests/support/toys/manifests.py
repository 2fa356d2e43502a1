"""A Manifest and an IndexLine for tests of the store."""

from pathlib import Path
from typing import Any

from dsl.graph import Graph
from executor.keys.node_key import KeyParts
from executor.records.run_record import Record
from executor.store.manifest import IndexLine, Manifest


def made(key: str = "k1", run: str = "r1", **values: Any) -> tuple[Manifest, IndexLine]:
    """The arguments of `Store.commit` for a node that ran. values: fields of the manifest."""
    plain = {"node": "n", "op": "make", "key_parts": KeyParts("make", 1, {}, {}, {}, {}), "inputs": {}}
    return Manifest(**{**plain, "run": run, "key": key, **values}), IndexLine(digest="", run=run, time=0.0)


def new_record(records: Path, graph: Graph, **state: Any) -> Record:
    """Create a record, and save its state."""
    record = Record.prepare(records, graph, **state)
    record.save_all()
    return record
