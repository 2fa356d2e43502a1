"""The files that MLflow gets of a node: its log and figures, and of its artifact what is small enough."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from executor.records.run_record import Record
from executor.store.artifact_store import Store
from executor.store.digests import MANIFEST, OUTSIDE_DIGEST
from executor.store.run_measurements import own_files
from executor.system.jsonlines import read_json

FILE_LIMIT = 1 << 20  # larger files of an artifact stand in references.json instead


def node_files(record: Record, node_id: str, figures: Iterable[Path]) -> tuple[dict[str, Path], dict[str, Any]]:
    """By their names in MLflow, and what references.json says of the large ones; of what was cached, its manifest."""
    state, records = record.state.nodes[node_id], record.folder.parent
    files = {f"figures/{path.name}": path for path in figures}
    references: dict[str, Any] = {}
    is_hit = state.cache == "hit"
    if not is_hit:
        log = record.log_path(node_id)
        files[log.name] = log
    if state.digest is not None:
        folder = records.parent / "objects" / state.digest
        maker = state.source_run if is_hit else record.run
        own = own_files(records, maker, Store(records.parent).computed_key(maker, state.key), folder)
        files |= {MANIFEST: own[MANIFEST]} if MANIFEST in own else {}
        if not is_hit:
            small, references = artifact_files(folder, own)
            files |= small
    return files, references


def artifact_files(folder: Path, own: Mapping[str, Path]) -> tuple[dict[str, Path], dict[str, Any]]:
    """The small files of an artifact by their names in MLflow, and for the others where they are and what they hold.

    own: the files outside its digest that are to be among them, see store/run_measurements.py.
    """
    files = (read_json(own.get(MANIFEST, folder / MANIFEST)) or {}).get("files", {})
    paths = {name: own.get(name, folder / name) for name in files if name in own or name not in OUTSIDE_DIGEST}
    large = {
        name: {**files[name], "path": str(path)} for name, path in paths.items() if files[name]["size"] > FILE_LIMIT
    }
    return {f"artifact/{name}": path for name, path in paths.items() if name not in large}, large
