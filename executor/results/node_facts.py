"""What MLflow is told of a node beside its results: its parameters, and what it read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from dsl.graph import GraphNode
from dsl.launch import Launch
from dsl.op import Ref
from dsl.shown import toml_text
from executor.records.run_record import Record
from executor.store.digests import MANIFEST
from executor.system.jsonlines import read_json


@frozen
class Dataset:
    """Something that a node read. context: the edge or field that names it; path: None where several files are one."""

    context: str
    name: str
    digest: str
    path: str | None


def params(node: GraphNode, *, edges: bool = True) -> dict[str, str]:
    """The values as texts: as TOML has them, but no quotes around a text."""
    return {
        name: value if isinstance(value, str) else toml_text(value) for name, value in values(node, edges=edges).items()
    }


def values(node: GraphNode, *, edges: bool = True) -> dict[str, Any]:
    """The flat config, and what of the launch is not as usual; edges: also the nodes that are read."""
    found: dict[str, Any] = {"op": node.op.name}
    for name in node.op.edges if edges else ():
        value = getattr(node.config, name)
        found |= {} if value is None else _flat(name, value)
    for name in node.op.fields:
        found |= _flat(name, getattr(node.config, name))
    usual = Launch()
    for field in attrs.fields(Launch):
        value = getattr(node.launch, field.name)
        if value != getattr(usual, field.name):
            found |= _flat(f"launch.{field.name}", value)
    return found


def _flat(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: each for part, member in value.items() for key, each in _flat(f"{name}.{part}", member).items()}
    return {name: str(value) if isinstance(value, Ref) else value}


def artifacts_read(store: Path, record: Record, node: GraphNode) -> Iterable[Dataset]:
    for edge, producers in node.inputs.items():
        for producer in producers:
            digest = record.state.nodes[producer].digest or ""
            yield Dataset(edge, producer, digest, str(store / "objects" / digest))


def files_read(store: Path, node: GraphNode, digest: str) -> Iterable[Dataset]:
    """The files and folders that the config of a node names, as they were when the artifact of that digest was made."""
    manifest = read_json(store / "objects" / digest / MANIFEST) or {}
    for field, content in manifest.get("key_parts", {}).get("external", {}).items():
        path = getattr(node.config, field) if field in node.op.fields else None
        yield Dataset(field, Path(path).name if path else f"{node.id}.{field}", content, path)
