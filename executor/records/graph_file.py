"""The graph in a run's record. Paths in the store's project are relative to the store, so the project can be moved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.convert import structure
from dsl.errors import StoreError, StructureError
from dsl.files import NO_FILE, compact, known_fields, parsed_object, read_json_or_none, read_plain, replace_file
from dsl.graph import Graph
from dsl.pipeline import Copy
from executor.system.trust import require_own_store

GRAPH = "graph.json"


@frozen
class RecordedNode:
    """A node as graph.json holds it; its op need not exist any more. In its config a reference is "@node"."""

    op: str = ""
    config: Mapping[str, Any] = {}
    launch: Mapping[str, Any] = {}
    copy: Copy | None = None


def save_graph(folder: Path, graph: Graph) -> None:
    """Write the graph into a record's folder."""
    from dsl.graph import graph_to_json  # of no use to a plan

    data = graph_to_json(graph)
    store = _store(folder)
    paths = {"root": _relative(data["root"], store), "op_files": [_relative(file, store) for file in data["op_files"]]}
    replace_file(folder / GRAPH, compact({**data, **paths, "store": str(store)}), durable=True)


def load_graph(folder: Path) -> Graph:
    """Load the graph of a run's record.

    Raises StoreError where it is damaged, PipelineError where it does not fit the current ops, and NotTrusted where its
    op files would be imported from somebody else's store.
    """
    from dsl.graph import graph_from_json

    data = parsed_object(_graph_text(folder))
    if data is None:
        raise damaged(folder, GRAPH)
    op_files = recorded_op_files(folder, data)
    if op_files:
        require_own_store(_store(folder))
    try:
        before = Path(data.pop("store", _store(folder)))
        root = _absolute(data["root"], _store(folder), before)
        return graph_from_json({**data, "root": root, "op_files": op_files})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(folder, GRAPH) from error


def recorded_op_files(folder: Path, data: Mapping[str, Any] | None = None) -> list[Path]:
    """The op files of a recorded graph, as absolute paths, as far as they exist. data: the graph file's content."""
    table = recorded_table(folder, GRAPH) if data is None else data
    here = _store(folder)
    try:
        before = Path(table.get("store", here))
        return [Path(_absolute(file, here, before)) for file in table["op_files"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(folder, GRAPH) from error


def _graph_text(folder: Path) -> bytes:
    """The content of the graph's file; empty where there is none. Raises StoreError where it is damaged."""
    try:
        return read_plain(folder / GRAPH)
    except (FileNotFoundError, NotADirectoryError):
        return b""
    except OSError as error:
        if error.errno in NO_FILE:
            raise damaged(folder, GRAPH) from error
        raise


def recorded_nodes(folder: Path) -> dict[str, RecordedNode]:
    """The nodes of a record by id, without loading their ops; empty where there is no graph."""
    try:
        nodes = recorded_table(folder, GRAPH).get("nodes", ())
        return {node["id"]: structure(RecordedNode, known_fields(RecordedNode, node)) for node in nodes}
    except (KeyError, TypeError, AttributeError, StructureError) as error:
        raise damaged(folder, GRAPH) from error


def recorded_table(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON file of a record; empty where it does not exist. Raises StoreError where it is damaged."""
    try:
        value = read_json_or_none(folder / name)
    except ValueError as error:
        raise damaged(folder, name) from error
    if value is not None and not isinstance(value, dict):
        raise damaged(folder, name)
    return value or {}


def damaged(folder: Path, name: str) -> StoreError:
    return StoreError(
        f"the record of run {folder.name} is damaged ({folder / name}); start a new run with `dflow run FILE`, "
        f"or remove the record: dflow rm {folder.name}"
    )


def _store(folder: Path) -> Path:
    return folder.absolute().parent.parent


def _relative(path: str, store: Path) -> str:
    return os.path.relpath(path, store) if Path(path).is_relative_to(store.parent) else path


def _absolute(path: str, here: Path, before: Path) -> str:
    """A recorded path made absolute: relative to the store, or to its earlier place if it moved without its project."""
    found = os.path.normpath(here / path)
    return found if Path(found).exists() else os.path.normpath(before / path)
