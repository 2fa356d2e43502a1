"""The Python DSL: a pipeline is a list of named nodes; a node is an op's config, with references to other nodes.

    p = Pipeline("vlm-dflash", seed=0, experiment="vlm-dflash")
    samples = p.node("ingest", Ingest(source="builtin:digits"))
    images = p.node("inject", InjectImages(samples=samples))

It becomes the tree that a pipeline file is (dsl/tree.py), so that both are checked alike.
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

from dsl.errors import ConfigError, PipelineError
from dsl.launch import TABLE_NAMES, Launch, Machine, check_tags, check_tracking_uri
from dsl.op import OpSpec, Ref, op_of
from dsl.op_table import INIT, use_checked_folders

__all__ = ["Launch", "Machine", "Node", "Pipeline"]

NODE_ID = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
TAKEN_ID = 'node id "{0}": that is the table [{0}], in -s and in ${{...}}'


@frozen
class Copy:
    """The origin of a copied node: the id of the node in the file, and the variant chosen in each group.

    Copy("train", {"train.lr": "0.001"}) is a sweep's copy; a sweep's group is named by its field.
    """

    template: str
    values: Mapping[str, str]


def selected_by(name: str, nodes: Mapping[str, Copy | None]) -> tuple[str, ...]:
    """The ids of the nodes that a name on the command line selects: the node itself, or all copies of it."""
    if name in nodes:
        return (name,)
    return tuple(node_id for node_id, copy in nodes.items() if copy is not None and copy.template == name)


def wrong_id(node_id: str) -> str:
    """A text on why a node cannot have this id; empty if it can."""
    if not NODE_ID.fullmatch(node_id):
        return f'node id "{node_id}": letters, digits, "_" and "-" only, and a letter first'
    return TAKEN_ID.format(node_id) if node_id in TABLE_NAMES else ""


@frozen
class Node:
    """One node of a pipeline before it is compiled."""

    id: str
    config: Any
    launch: Launch = attrs.field(factory=Launch)
    copy: Copy | None = None

    @property
    def op(self) -> OpSpec:
        return op_of(self.config)


_file_folder: ContextVar[Path | None] = ContextVar("file_folder", default=None)


@contextmanager
def relative_to(folder: Path) -> Iterator[None]:
    """Let pipelines that are made in this context resolve relative paths from `folder`, that of their Python file."""
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

    def node(self, node_id: str, config: Any, *, launch: Launch | None = None) -> Any:
        """Add a node; returns the reference to its output, to be given to configs of later nodes.

        A `seed` of None in the config becomes the pipeline's. Raises ConfigError for an id that is taken or malformed.
        """
        if wrong := wrong_id(node_id):
            raise ConfigError(wrong)
        if node_id in self.nodes:
            raise ConfigError(f'there are two nodes "{node_id}"')
        op_of(config)
        self.nodes[node_id] = Node(node_id, config, launch or Launch())
        return Ref(node_id)
