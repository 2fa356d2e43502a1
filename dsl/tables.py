"""The tables of a pipeline file beside its nodes: the pipeline itself, MLflow and the machine; and a node's launch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs
from attrs import frozen, validators

from dsl.errors import ConfigError, did_you_mean
from dsl.launch import Launch, Machine
from dsl.op import ConfigField, config_fields
from dsl.shown import shown_value

LAUNCH = "launch"  # the table of a node that says how it is started
RESERVED_TAGS = ("dflow.", "mlflow.")
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")  # with the name of a driver too: mysql+pymysql
# The kinds of addresses that MLflow knows without plugins.
SCHEMES = (*DATABASES, "http", "https", "file", "databricks", "databricks-uc", "uc")
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9.-]*)(\+\w+)?:")


def check_tags(tags: Mapping[str, str]) -> None:
    """Check the tags of a pipeline. Raises ConfigError for a tag that MLflow cannot hold, or that dflow
    itself writes.
    """
    for name, value in tags.items():
        if not name.strip():
            raise ConfigError("a tag needs a name")
        if name.startswith(RESERVED_TAGS):
            raise ConfigError(f'the tag "{name}": names that begin with {" or ".join(RESERVED_TAGS)} are reserved')
        if not isinstance(value, str):
            raise ConfigError(f'the tag "{name}": expected a text, got {shown_value(value)}')


def check_tracking_uri(uri: str) -> None:
    """Check the scheme of a tracking URI. Raises ConfigError if neither MLflow nor a plugin has it; a path has none."""
    found = SCHEME.match(uri)
    if found is None:
        return
    scheme, driver = found[1].lower(), found[2]
    if scheme in SCHEMES and (driver is None or scheme in DATABASES):
        return
    from importlib.metadata import entry_points  # slow to import

    if entry_points(group="mlflow.tracking_store", name=scheme):
        return
    hint = did_you_mean(scheme, SCHEMES) or f"supported: {', '.join(SCHEMES)}"
    raise ConfigError(f'MLflow does not support tracking servers of the kind "{found[0]}" ({hint})')


def _are_tags(_table: MlflowTable, _field: attrs.Attribute[dict[str, str]], tags: dict[str, str]) -> None:
    check_tags(tags)


def _is_known(_table: MlflowTable, _field: attrs.Attribute[str], uri: str) -> None:
    check_tracking_uri(uri)


@frozen(kw_only=True)
class PipelineTable:
    """The table `[pipeline]`. ops: files; drafts: folders; both relative to the pipeline file."""

    name: str = attrs.field(validator=validators.min_len(1))
    seed: int = 0
    ops: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()


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


@frozen(kw_only=True)
class _Node:
    """The keys that every node has beside those of its op."""

    launch: Launch = attrs.field(factory=Launch)


CLASSES: Mapping[str, type[Any]] = {"pipeline": PipelineTable, "mlflow": MlflowTable, "machine": Machine}
TABLE_NAMES = tuple(CLASSES)
FIELDS: Mapping[str, Mapping[str, ConfigField]] = {name: config_fields(cls) for name, cls in CLASSES.items()}
LAUNCH_FIELD = config_fields(_Node)[LAUNCH]
