"""The state of a node's inputs when its stage starts: key parts, the sources that they were made from, and its data.

The stage runs these sources, so an edit while it runs counts for the next run. It reads data at any time, so that data
is checked again before the commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import attrs
from attrs import frozen

from dsl.graph import Graph, GraphNode
from executor.keys.external_inputs import ExternalDigests, Look, Tree, look_at, tree_of
from executor.keys.node_key import KeyParts, LibraryVersions, Sources, externals_of, library_versions, node_parts
from executor.store.artifact_store import Store
from executor.system.sealed_json import write_sealed


@frozen
class CurrentInputs:
    """parts: the current ones, with the code of the snapshot; written: files that were written since the snapshot."""

    parts: KeyParts
    written: tuple[str, ...]


@frozen
class Snapshot:
    """sources: by the path of each file that the key's code was read from; torn: files that changed since then."""

    node: GraphNode
    parts: KeyParts
    sources: Mapping[str, bytes]
    torn: tuple[str, ...]
    looks: Mapping[str, Look]

    @classmethod
    def of(cls, store: Store, graph: Graph, node_id: str) -> Snapshot:
        """The current code and data. Raises DataError or ConfigError if they cannot be read."""
        node, list_path = graph.nodes[node_id], cache(tree_of)
        keys_sources = Sources.now(store.external_memo, ExternalDigests(store.external_memo, list_path=list_path))
        parts = node_parts(graph, node_id, keys_sources)
        contents = keys_sources.code.contents
        read = ((file, _content(file)) for file in sorted(contents))
        sources = {file: source for file, source in read if hashlib.sha256(source).hexdigest() == contents[file]}
        torn = tuple(sorted(contents.keys() - sources.keys()))
        return cls(node, parts, sources, torn, _looks(node, list_path))

    def write_sources(self, path: Path) -> str:
        """For the ranks of the stage: JSON, a character for each byte. Returns the file's digest."""
        return write_sealed(path, {file: source.decode("latin-1") for file, source in self.sources.items()})

    def since(self, store: Store) -> CurrentInputs:
        """The current data, of which only files written since then are read. Raises DataError."""
        list_path = cache(tree_of)
        looks = _looks(self.node, list_path)
        written = [look.newest for name, look in looks.items() if look.listing != self.looks[name].listing]
        external = self.parts.external
        if written:
            digests = ExternalDigests(store.external_memo, list_path=list_path)
            external = {name: digests.of(each) for name, each in externals_of(self.node).items()}
        now = attrs.evolve(self.parts, external=external, libraries=library_versions(self.node, LibraryVersions()))
        return CurrentInputs(now, tuple(dict.fromkeys(written)))

    def unseen(self, loaded: Sequence[str]) -> list[str]:
        """The files that a stage loaded and that are not part of the key."""
        seen = {Path(file).resolve() for file in self.sources}
        return [file for file in loaded if Path(file).resolve() not in seen]


def _looks(node: GraphNode, list_path: Callable[[Path], Tree]) -> dict[str, Look]:
    return {name: look_at(external, list_path) for name, external in externals_of(node).items()}


def _content(file: str) -> bytes:
    """Empty if the file is gone."""
    try:
        return Path(file).read_bytes()
    except OSError:
        return b""
