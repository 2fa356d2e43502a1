"""What is sent to MLflow of a node besides its metrics: inputs, log, figures, small files, the logged model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.graph import GraphNode
from executor.records.run_record import Record
from executor.store.artifact_store import Store
from executor.store.digests import MANIFEST, OUTSIDE_DIGEST
from executor.store.manifest import Manifest
from executor.store.run_measurements import own_files
from ops.lib.logged_model import LoggedModel, Tensor

NAME_LENGTH = 250
FILE_LIMIT = 1 << 20  # larger files of an artifact are listed in references.json instead


@frozen
class Dataset:
    """Something that a node read. context: the edge or field that names it; path: None where several files are one."""

    context: str
    name: str
    digest: str
    path: str | None


@frozen
class Reference:
    """A file of an artifact that is too large for MLflow. size: bytes."""

    size: int
    sha256: str
    path: str


@frozen
class ModelFiles:
    """maker: the MLflow run that made the model. small: files by name; large: the others."""

    maker: str
    small: Mapping[str, Path]
    large: Mapping[str, Reference]


def artifacts_read(store: Path, record: Record, node: GraphNode) -> Iterable[Dataset]:
    for edge, producers in node.inputs.items():
        for producer in producers:
            digest = record.state.nodes[producer].digest or ""
            yield Dataset(edge, producer, digest, str(store / "objects" / digest))


def files_read(store: Path, node: GraphNode, digest: str) -> Iterable[Dataset]:
    """The files and folders in a node's config, with their content when the artifact of that digest was computed."""
    manifest = Manifest.of(store / "objects" / digest)
    for field, content in ({} if manifest is None else manifest.key_parts.external).items():
        path = getattr(node.config, field) if field in node.op.fields else None
        yield Dataset(field, Path(path).name if path else f"{node.id}.{field}", content, path)


def node_files(record: Record, node_id: str, figures: Iterable[str]) -> tuple[dict[str, Path], dict[str, Reference]]:
    """Files by their names in MLflow, and references.json for the large ones; of a cached node only the manifest.

    figures: their names; the files lie in the record.
    """
    state, records = record.state.nodes[node_id], record.folder.parent
    paths = [record.figures_path(node_id) / f"{name}.png" for name in figures]
    files = {f"figures/{path.name}": path for path in paths}
    references: dict[str, Reference] = {}
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


def artifact_files(folder: Path, own: Mapping[str, Path]) -> tuple[dict[str, Path], dict[str, Reference]]:
    """The small files of an artifact by their names in MLflow, and the others.

    own: the files outside its digest to include, see store/run_measurements.py.
    """
    manifest = Manifest.read(own.get(MANIFEST, folder / MANIFEST))
    files = {} if manifest is None else manifest.files
    paths = {name: own.get(name, folder / name) for name in files if name in own or name not in OUTSIDE_DIGEST}
    large = {
        name: Reference(files[name].size, files[name].sha256, str(path))
        for name, path in paths.items()
        if files[name].size > FILE_LIMIT
    }
    return {f"artifact/{name}": path for name, path in paths.items() if name not in large}, large


def whole_artifact(record: Record, node_id: str) -> dict[str, Path]:
    """The files of an artifact by their names in MLflow, in order; none where the store no longer holds it."""
    state, records = record.state.nodes[node_id], record.folder.parent
    assert state.digest is not None
    folder = records.parent / "objects" / state.digest
    maker = state.source_run if state.cache == "hit" else record.run
    own = own_files(records, maker, Store(records.parent).computed_key(maker, state.key), folder)
    small, large = artifact_files(folder, own)
    return dict(sorted({**small, **{f"artifact/{name}": Path(file.path) for name, file in large.items()}}.items()))


def model_name(name: str) -> str:
    """The name without characters that are not allowed in the name of a model."""
    return re.sub(r"[/:.%\"']", "_", name)[:NAME_LENGTH]


def mlmodel(model_id: str, model: LoggedModel) -> dict[str, Any]:
    """The file by which MLflow knows a model: its signature, and that its weights are safetensors.

    JSON of it is YAML, as MLflow reads it. Source: https://mlflow.org/docs/latest/ml/model, tensor-based signatures.
    """
    signature = {"inputs": _columns(model.inputs), "outputs": _columns(model.outputs), "params": None}
    return {"model_id": model_id, "flavors": {"safetensors": {"data": "."}}, "signature": signature}


def _columns(tensors: Sequence[Tensor]) -> str:
    shown = [
        {"name": each.name, "type": "tensor", "tensor-spec": {"dtype": each.dtype, "shape": list(each.shape)}}
        for each in tensors
    ]
    return json.dumps(shown)
