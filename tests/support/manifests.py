"""A Manifest and an IndexLine for tests of the store."""

from typing import Any

from executor.keys.node_key import KeyParts
from executor.store.index_line import IndexLine
from executor.store.manifest import Manifest


def made(key: str = "k1", run: str = "r1", **values: Any) -> tuple[Manifest, IndexLine]:
    """What `Store.commit` takes for a node that ran; values: fields of the manifest."""
    plain = {"node": "n", "op": "make", "key_parts": KeyParts("make", 1, {}, {}, {}, {}), "inputs": {}}
    return Manifest(**{**plain, "run": run, "key": key, **values}), IndexLine(digest="", run=run, time=0.0)
