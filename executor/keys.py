"""The key of a node: everything that decides what its artifact holds, and what changed between two keys.

key = H(format, op name, op version, code, config without neutral fields, external content, input digests, libraries)
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.fingerprint import code_fingerprints, fingerprint, key_config
from dsl.graph import Graph, GraphNode
from executor.external import ExternalDigests

FORMAT = 1
PROJECT = Path(__file__).resolve().parent.parent
NAMES_SHOWN = 3

Inputs = Mapping[str, Any]  # edge -> digest, None, or a list of digests


@frozen
class KeyParts:
    """The parts of a node's key that do not depend on other nodes.

    code maps "module:symbol" to a hash, external a field to the digest of its content,
    libraries a distribution to its version.
    """

    op: str
    version: int
    code: Mapping[str, str]
    config: Mapping[str, Any]
    external: Mapping[str, str]
    libraries: Mapping[str, str]

    def key(self, inputs: Inputs) -> str:
        """SHA-256 in hex."""
        return self._hash(inputs, dict(self.code))

    def key_without_code(self, inputs: Inputs) -> str:
        """The same for every state of the code: by this, work in progress is found again after a fix."""
        return self._hash(inputs, {})

    def _hash(self, inputs: Inputs, code: Mapping[str, str]) -> str:
        return fingerprint(
            {
                "format": FORMAT,
                "op": self.op,
                "version": self.version,
                "code": code,
                "config": self.config,
                "external": self.external,
                "libraries": self.libraries,
                "inputs": dict(inputs),
            }
        )

    def to_json(self) -> dict[str, Any]:
        """As stored in records and manifests, and compared by `changes`; tuples become lists."""
        plain = {
            "op": self.op,
            "version": self.version,
            "code": dict(self.code),
            "config": dict(self.config),
            "external": dict(self.external),
            "libraries": dict(self.libraries),
        }
        parts: dict[str, Any] = json.loads(json.dumps(plain, default=str))
        return parts


def graph_parts(graph: Graph, externals: ExternalDigests, without: Container[str] = ()) -> dict[str, KeyParts]:
    """The key parts of every node not in `without`. Raises DataError where an external file cannot be read."""
    return {node_id: node_parts(graph, node_id, externals) for node_id in graph.nodes if node_id not in without}


def node_parts(graph: Graph, node_id: str, externals: ExternalDigests) -> KeyParts:
    """The key parts of one node, from the files of code and data as they are now."""
    node = graph.nodes[node_id]
    roots = [PROJECT, *dict.fromkeys(path.parent for path in graph.op_files)]
    return KeyParts(
        op=node.op.name,
        version=node.op.version,
        code=_code(node, roots),
        config=key_config(node),
        external=_external(node, externals),
        libraries={name: _library_version(name) for name in (*node.op.key_libraries, *_chosen_libraries(node))},
    )


def node_inputs(node: GraphNode, digest_of: Callable[[str], Any]) -> dict[str, Any]:
    """Every edge with `digest_of` its producer: one, None for an edge not given, a list for a `tuple` edge."""
    inputs: dict[str, Any] = {}
    for name, edge in node.op.edges.items():
        producers = node.inputs.get(name, ())
        if edge.many:
            inputs[name] = [digest_of(producer) for producer in producers]
        else:
            inputs[name] = digest_of(producers[0]) if producers else None
    return inputs


def changes(node: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two nodes' parts in JSON form, one line for each kind of change."""
    lines = []
    if (old["op"], old["version"]) != (new["op"], new["version"]):
        lines.append(f"op changed: {old['op']} version {old['version']} to {new['op']} version {new['version']}")
    fields = _differing(old["config"], new["config"])
    if fields:
        shown = [f"{node}.{name} {_from_to(old['config'], new['config'], name)}" for name in fields]
        lines.append(f"config changed: {_some(shown)}")
    external = _differing(old["external"], new["external"])
    if external:
        lines.append(f"content changed: {_some([f'{node}.{name}' for name in external])}")
    code = _differing(old["code"], new["code"])
    if code:
        lines.append(f"code changed: {_some(code)}")
    libraries = _differing(old["libraries"], new["libraries"])
    if libraries:
        shown = [f"{name} {_from_to(old['libraries'], new['libraries'], name)}" for name in libraries]
        lines.append(f"library changed: {_some(shown)}")
    return lines


def _external(node: GraphNode, externals: ExternalDigests) -> dict[str, str]:
    found = {}
    for name, spec in node.op.fields.items():
        value = getattr(node.config, name)
        if spec.external and isinstance(value, str) and Path(value).is_absolute():
            found[name] = externals.of(Path(value))
    if hasattr(node.config, "external_files"):
        found["external_files"] = externals.of_all(node.config.external_files())
    return found


def _code(node: GraphNode, roots: Sequence[Path]) -> dict[str, str]:
    """Of the run function, and of what the config chooses."""
    chosen: tuple[str, ...] = node.config.chosen_code() if hasattr(node.config, "chosen_code") else ()
    code: dict[str, str] = {}
    for symbol in (node.op.run, *chosen):
        code |= code_fingerprints(symbol, roots)
    return dict(sorted(code.items()))


def _chosen_libraries(node: GraphNode) -> tuple[str, ...]:
    chosen: tuple[str, ...] = node.config.chosen_libraries() if hasattr(node.config, "chosen_libraries") else ()
    return chosen


def _library_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    absent = object()
    names = sorted({*old, *new})
    return [name for name in names if not _same(old.get(name, absent), new.get(name, absent))]


def _same(old: Any, new: Any) -> bool:
    return type(old) is type(new) and bool(old == new)


def _from_to(old: Mapping[str, Any], new: Mapping[str, Any], name: str) -> str:
    if name not in old:
        return f"set to {_shown(new[name])}"
    if name not in new:
        return f"no longer there, was {_shown(old[name])}"
    return f"from {_shown(old[name])} to {_shown(new[name])}"


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _some(lines: Sequence[str]) -> str:
    rest = len(lines) - NAMES_SHOWN
    return ", ".join(lines[:NAMES_SHOWN]) + (f", and {rest} more" if rest > 0 else "")
