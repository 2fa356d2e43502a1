"""The Python DSL: a pipeline is a list of named nodes; a node is an op's config, with references to other nodes.

    p = Pipeline("vlm-dflash", seed=0, experiment="vlm-dflash")
    samples = p.node("ingest", Ingest(source="builtin:digits"))
    images = p.node("inject", InjectImages(samples=samples))

The TOML reader makes the same objects, with the position of every key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from dsl.document import TABLE_NAMES, Places
from dsl.draft_folders import INIT, use_checked_folders
from dsl.errors import ConfigError, PipelineError, did_you_mean
from dsl.launch import Launch, Machine
from dsl.op import OpSpec, Ref, op_of
from dsl.shown import shown_value

__all__ = ["Launch", "Machine", "Node", "Pipeline", "check_tags"]

NODE_ID = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
TAKEN_ID = 'node id "{0}": that is the table [{0}], in -s and in ${{...}}'
RESERVED_TAGS = ("dflow.", "mlflow.")
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")  # with the name of a driver too: mysql+pymysql
# The kinds of addresses that MLflow knows without plugins.
SCHEMES = (*DATABASES, "http", "https", "file", "databricks", "databricks-uc", "uc")
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9.-]*)(\+\w+)?:")


def check_tags(tags: Mapping[str, str]) -> None:
    """Raises ConfigError for a tag that MLflow could not hold, or that dflow writes itself."""
    for name, value in tags.items():
        if not name.strip():
            raise ConfigError("a tag needs a name")
        if name.startswith(RESERVED_TAGS):
            raise ConfigError(f'the tag "{name}": names that begin with {" or ".join(RESERVED_TAGS)} are reserved')
        if not isinstance(value, str):
            raise ConfigError(f'the tag "{name}": expected a text, got {shown_value(value)}')


def check_tracking_uri(uri: str) -> None:
    """Raises ConfigError for a scheme that neither MLflow nor an installed plugin of it has. A path has none."""
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


@frozen
class Copy:
    """Which copy of a written node a node is: that node's id, and by group, of a sweep the field, what it differs in.

    Copy("train", {"train.lr": "0.001"}).
    """

    template: str
    values: Mapping[str, str]


def selected_by(name: str, nodes: Mapping[str, Copy | None]) -> tuple[str, ...]:
    """The ids of the nodes that a name on the command line selects: the node itself, or all copies of it."""
    if name in nodes:
        return (name,)
    return tuple(node_id for node_id, copy in nodes.items() if copy is not None and copy.template == name)


@frozen
class Node:
    """One node as written. takes_seed: it gave no seed of its own, so its config holds the pipeline's."""

    id: str
    config: Any
    launch: Launch = attrs.field(factory=Launch)
    places: Places = attrs.field(factory=Places, eq=False, repr=False)
    takes_seed: bool = attrs.field(default=False, eq=False, repr=False)
    copy: Copy | None = None

    @property
    def op(self) -> OpSpec:
        return op_of(self.config)


_file_folder: ContextVar[Path | None] = ContextVar("file_folder", default=None)


@contextmanager
def relative_to(folder: Path) -> Iterator[None]:
    """Pipelines that are made inside have their paths from the folder: that of a pipeline file in Python."""
    token = _file_folder.set(folder)
    try:
        yield
    finally:
        _file_folder.reset(token)


class Pipeline:
    """A named list of nodes.

    root is the folder that relative paths start from (default: that of the pipeline file if there is one, else the
    working directory). op_files are the user's own op modules, loaded beside the built-in ones; drafts: folders of
    draft algorithms of their own, from then on known to configs. tags and notes stand
    in MLflow at the pipeline's run, which is sent there unless tracking is false. machine: what its nodes may use
    of this machine together. sort_by: the metric by which the table of a sweep is sorted, "-" before it where the least
    comes first. upload: the nodes whose whole artifacts are sent to MLflow.
    """

    def __init__(
        self,
        name: str,
        *,
        seed: int = 0,
        experiment: str | None = None,
        tracking: bool = True,
        tracking_uri: str | None = None,
        root: Path | None = None,
        op_files: tuple[Path, ...] = (),
        drafts: tuple[Path, ...] = (),
        tags: Mapping[str, str] | None = None,
        notes: str = "",
        machine: Machine | None = None,
        sort_by: str = "",
        upload: tuple[str, ...] = (),
    ) -> None:
        check_tags(tags or {})
        check_tracking_uri(tracking_uri or "")
        self.name = name
        self.seed = seed
        self.experiment = experiment or name
        self.tracking = tracking
        self.tracking_uri = tracking_uri
        self.root_given = root is not None
        self.root = (root or _file_folder.get() or Path.cwd()).absolute()
        self.op_files = (*op_files, *(self.root / folder / INIT for folder in drafts))
        if drafts and (mistakes := use_checked_folders(self.op_files)):
            raise PipelineError(mistakes)
        self.tags = dict(tags or {})
        self.notes = notes
        self.machine = machine or Machine()
        self.sort_by = sort_by
        self.upload = upload
        self.nodes: dict[str, Node] = {}

    def node(
        self,
        node_id: str,
        config: Any,
        *,
        launch: Launch | None = None,
        places: Places | None = None,
        copy: Copy | None = None,
    ) -> Any:
        """Add a node and return the reference to its output, to be given to the configs of later nodes.

        A `seed` of None in the config becomes the pipeline's. Raises ConfigError for an id that is taken or malformed.
        """
        if not NODE_ID.fullmatch(node_id):
            raise ConfigError(f'node id "{node_id}": letters, digits, "_" and "-" only, and a letter first')
        if node_id in TABLE_NAMES:
            raise ConfigError(TAKEN_ID.format(node_id))
        if node_id in self.nodes:
            raise ConfigError(f'there are two nodes "{node_id}"')
        takes_seed = "seed" in op_of(config).fields and config.seed is None
        if takes_seed:
            config = attrs.evolve(config, seed=self.seed)
        self.nodes[node_id] = Node(node_id, config, launch or Launch(), places or Places(), takes_seed, copy)
        return Ref(node_id)
