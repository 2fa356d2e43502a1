"""What a node's stage was started with: its key parts, and the stamps of all code and data that they were made from.

A stage imports and reads at any time while it runs. Only where nothing changed from its start to its end, not even to
and fro, is it certain that it ran what its key says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

from dsl.graph import Graph
from executor.keys import KeyParts, Sources, changes, node_parts
from executor.stamps import Stamp
from executor.store import Store


@frozen
class Snapshot:
    """files: the stamps of source files by path; external: a hash of names and stamps for each file or folder."""

    node: str
    parts: KeyParts
    files: Mapping[str, Stamp | None]
    external: Mapping[str, str]

    @classmethod
    def of(cls, store: Store, graph: Graph, node_id: str) -> Snapshot:
        """Code and data as they are now. Raises DataError or ConfigError where they cannot be read."""
        sources = Sources.now(store.external_memo)
        parts = node_parts(graph, node_id, sources)
        return cls(node_id, parts, sources.code.stamps, sources.externals.listings)

    def changes(self, now: Snapshot) -> list[str]:
        """What is not as it was, a line for each kind of change; also what was changed and put back."""
        different = changes(self.node, self.parts.to_json(), now.parts.to_json())
        if different:
            return different
        before, after = {**self.files, **self.external}, {**now.files, **now.external}
        written = [name for name in before if before[name] != after.get(name)]
        return [f"written meanwhile: {', '.join(written)}"] if written else []

    def unseen(self, loaded: Sequence[str]) -> list[str]:
        """Of the files that a stage loaded those that are no part of the key."""
        seen = {Path(file).resolve() for file in self.files}
        return [file for file in loaded if Path(file).resolve() not in seen]
