"""The Python DSL: a pipeline is a list of named nodes; a node is an op's config, with references to other nodes.

    p = Pipeline("vlm-dflash", seed=0, experiment="vlm-dflash")
    samples = p.node("ingest", Ingest(source="builtin:digits"))
    images = p.node("inject", InjectImages(samples=samples))

The TOML reader makes the same objects, with the position of every key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from dsl.document import Places
from dsl.errors import ConfigError
from dsl.launch import Launch, Machine
from dsl.op import OpSpec, Ref, op_of
from dsl.shown import shown_value
from dsl.tracking_uri import check_tracking_uri

__all__ = ["Launch", "Machine", "Node", "Pipeline", "check_tags"]

NODE_ID = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
TABLE_NAMES = ("pipeline", "mlflow", "machine")
TAKEN_ID = 'node id "{0}": that is the table [{0}], in -s and in ${{...}}'
RESERVED_TAGS = ("dflow.", "mlflow.")


def check_tags(tags: Mapping[str, str]) -> None:
    """Raises ConfigError for a tag that MLflow could not hold, or that dflow writes itself."""
    for name, value in tags.items():
        if not name.strip():
            raise ConfigError("a tag needs a name")
        if name.startswith(RESERVED_TAGS):
            raise ConfigError(f'the tag "{name}": names that begin with {" or ".join(RESERVED_TAGS)} are taken')
        if not isinstance(value, str):
            raise ConfigError(f'the tag "{name}": expected a text, got {shown_value(value)}')


@frozen
class Copy:
    """Which copy of a written node a node is: that node's id, and by group, of a sweep the field, what it differs in.

    Copy("train", {"train.lr": "0.001"}).
    """

    template: str
    values: Mapping[str, str]


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


class Pipeline:
    """A named list of nodes.

    root is the folder that relative paths start from: unless given, that of the pipeline file that is read, or else
    the working directory. op_files are the user's own op modules, loaded beside the built-in ones. tags and notes stand
    in MLflow at the pipeline's run, which is sent there unless tracking is false. machine: what its nodes may use
    of this machine together. sort_by: the metric by which the table of a sweep is sorted, "-" before it where the least
    comes first.
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
        tags: Mapping[str, str] | None = None,
        notes: str = "",
        machine: Machine | None = None,
        sort_by: str = "",
    ) -> None:
        check_tags(tags or {})
        check_tracking_uri(tracking_uri or "")
        self.name = name
        self.seed = seed
        self.experiment = experiment or name
        self.tracking = tracking
        self.tracking_uri = tracking_uri
        self.root_given = root is not None
        self.root = (root or Path.cwd()).absolute()
        self.op_files = op_files
        self.tags = dict(tags or {})
        self.notes = notes
        self.machine = machine or Machine()
        self.sort_by = sort_by
        self.nodes: dict[str, Node] = {}

    def without_nodes(self) -> Pipeline:
        """Another pipeline with the same name and settings, to which nodes can be added."""
        pipeline = Pipeline(
            self.name,
            seed=self.seed,
            experiment=self.experiment,
            tracking=self.tracking,
            tracking_uri=self.tracking_uri,
            root=self.root,
            op_files=self.op_files,
            tags=self.tags,
            notes=self.notes,
            machine=self.machine,
            sort_by=self.sort_by,
        )
        pipeline.root_given = self.root_given
        return pipeline

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
            raise ConfigError(f'node "{node_id}" is there twice')
        takes_seed = "seed" in op_of(config).fields and config.seed is None
        if takes_seed:
            config = attrs.evolve(config, seed=self.seed)
        self.nodes[node_id] = Node(node_id, config, launch or Launch(), places or Places(), takes_seed, copy)
        return Ref(node_id)
