"""The tables of a pipeline file beside its nodes: the pipeline itself, MLflow and the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen, validators

from dsl.document import Places
from dsl.errors import did_you_mean, shortened
from dsl.finding import Finding
from dsl.launch import Machine
from dsl.op import config_fields
from dsl.pipeline import Pipeline, check_tags, check_tracking_uri
from dsl.unchecked_node import WrittenNode, table_mistakes


@frozen(kw_only=True)
class PipelineTable:
    """The table `[pipeline]`; the paths in ops, files, and in drafts, folders, are relative to the file."""

    name: str = attrs.field(validator=validators.min_len(1))
    seed: int = 0
    ops: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()


def _are_tags(_table: MlflowTable, _field: attrs.Attribute[dict[str, str]], tags: dict[str, str]) -> None:
    check_tags(tags)


def _is_known(_table: MlflowTable, _field: attrs.Attribute[str], uri: str) -> None:
    check_tracking_uri(uri)


@frozen(kw_only=True)
class MlflowTable:
    """The table `[mlflow]`: whether runs are tracked, where, their tags and notes, and the nodes whose whole
    artifacts are uploaded. Default: the pipeline's name as
    experiment, and SQLite in the store."""

    tracking: bool = True
    experiment: str | None = None
    tracking_uri: str | None = attrs.field(default=None, validator=validators.optional(_is_known))
    tags: dict[str, str] = attrs.field(factory=dict, validator=_are_tags)
    notes: str = ""
    upload: tuple[str, ...] = ()


CLASSES: Mapping[str, type] = {"pipeline": PipelineTable, "mlflow": MlflowTable, "machine": Machine}
FIELDS = {name: config_fields(cls) for name, cls in CLASSES.items()}


def written_table(name: str, values: Mapping[str, Any], places: Places) -> WrittenNode:
    return WrittenNode(name, None, dict(values), {}, places, table_fields=FIELDS[name])


def tables_of(pipeline: Pipeline) -> dict[str, WrittenNode]:
    """The tables of a pipeline as if they had been written out in full."""
    values: dict[str, dict[str, Any]] = {
        "pipeline": {"name": pipeline.name, "seed": pipeline.seed},
        "mlflow": {
            "tracking": pipeline.tracking,
            "tracking_uri": pipeline.tracking_uri,
            "tags": dict(pipeline.tags),
            "notes": pipeline.notes,
            "upload": list(pipeline.upload),
        },
        "machine": attrs.asdict(pipeline.machine),
    }
    if pipeline.experiment != pipeline.name:
        values["mlflow"]["experiment"] = pipeline.experiment
    return {name: written_table(name, values[name], Places(table=(name,))) for name in CLASSES}


def pipeline_of(
    tables: Mapping[str, WrittenNode], root: Path, op_files: tuple[Path, ...], ops: Mapping[str, str]
) -> tuple[Pipeline, list[Finding]]:
    """A pipeline without nodes, made of what is right in the tables, and all mistakes in them. ops: those of the nodes
    that it will have, by id."""
    mistakes = []
    for name, table in tables.items():
        if table.values or table.places.position("") is not None:  # a missing table is reported by itself
            mistakes += table_mistakes(table, CLASSES[name], ops)
    head, mlflow, machine = (tables[name].values for name in CLASSES)
    pipeline = Pipeline(
        head.get("name", ""),
        seed=head.get("seed", 0),
        experiment=mlflow.get("experiment"),
        tracking=mlflow.get("tracking", True),
        tracking_uri=mlflow.get("tracking_uri"),
        root=root,
        op_files=op_files,
        tags=mlflow.get("tags"),
        notes=mlflow.get("notes", ""),
        upload=mlflow.get("upload", ()),
        machine=Machine(**machine),
    )
    return pipeline, mistakes


def upload_mistakes(mlflow: WrittenNode, nodes: Sequence[str]) -> list[Finding]:
    """What `upload` names that is no node. nodes: ids, those of templates included."""
    unknown = [name for name in mlflow.values.get("upload", ()) if name not in nodes]
    return [
        mlflow.mistake(
            "upload",
            f'there is no node "{name}"',
            did_you_mean(name, nodes) or shortened(f"nodes: {', '.join(nodes) or 'none'}", 300),
        )
        for name in unknown
    ]
