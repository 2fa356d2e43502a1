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
from typing import Any, Literal

import attrs
from attrs import frozen, validators

from dsl.errors import ConfigError, Position
from dsl.op import OpSpec, Ref, op_of

NODE_ID = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def _needs_torchrun(launch: Launch, field: attrs.Attribute[int], value: int) -> None:
    if value > 1 and launch.kind != "torchrun":
        raise ValueError(f'{field.name} > 1 needs kind = "torchrun"')


def _makes_whole_groups(launch: Launch, field: attrs.Attribute[int], sp_degree: int) -> None:
    """The ranks form a mesh of nproc / sp_degree groups with sp_degree ranks each."""
    if launch.nproc < sp_degree:
        remedy = f"take nproc = {sp_degree} or a multiple of it, or a smaller sp_degree"
        raise ValueError(f"fewer ranks than the mesh needs: nproc = {launch.nproc}, sp_degree = {sp_degree}; {remedy}")
    if launch.nproc % sp_degree:
        below = launch.nproc - launch.nproc % sp_degree
        remedy = f"take nproc = {below} or {below + sp_degree}, or another sp_degree"
        raise ValueError(f"nproc = {launch.nproc} is no multiple of sp_degree = {sp_degree}; {remedy}")


@frozen(kw_only=True)
class Launch:
    """How a stage runs, not what it computes: outside the key, recorded in the manifest.

    kind "process" runs one process; "torchrun" runs nproc ranks on this machine. Groups of sp_degree ranks share every
    sequence, for ops that do sequence parallelism; nproc is a multiple of it. threads are CPU threads per rank (0: the
    cores divided by the ranks). device "auto" takes cuda where there is one.
    """

    kind: Literal["process", "torchrun"] = "process"
    nproc: int = attrs.field(default=1, validator=[validators.ge(1), _needs_torchrun])
    sp_degree: int = attrs.field(default=1, validator=[validators.ge(1), _needs_torchrun, _makes_whole_groups])
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = attrs.field(default=0, validator=validators.ge(0))


@frozen
class Node:
    """One node as written: positions maps "" (the node), "field" and "launch.field" to places in the file."""

    id: str
    config: Any
    launch: Launch = Launch()
    positions: Mapping[str, Position] = attrs.field(factory=dict, eq=False, repr=False)

    @property
    def op(self) -> OpSpec:
        return op_of(self.config)


class Pipeline:
    """A named list of nodes.

    root is the folder that relative paths start from: unless given, that of the pipeline file that is read, or else
    the working directory. op_files are the user's own op modules, loaded beside the built-in ones.
    """

    def __init__(
        self,
        name: str,
        *,
        seed: int = 0,
        experiment: str | None = None,
        tracking_uri: str | None = None,
        root: Path | None = None,
        op_files: tuple[Path, ...] = (),
    ) -> None:
        self.name = name
        self.seed = seed
        self.experiment = experiment or name
        self.tracking_uri = tracking_uri
        self.root_given = root is not None
        self.root = (root or Path.cwd()).absolute()
        self.op_files = op_files
        self.nodes: dict[str, Node] = {}

    def node(
        self,
        node_id: str,
        config: Any,
        *,
        launch: Launch | None = None,
        positions: Mapping[str, Position] | None = None,
    ) -> Any:
        """Add a node and return the reference to its output, to be given to the configs of later nodes.

        A `seed` of None in the config becomes the pipeline's. Raises ConfigError for an id that is taken or malformed.
        """
        if not NODE_ID.fullmatch(node_id):
            raise ConfigError(f'node id "{node_id}": letters, digits, "_" and "-" only, and a letter first')
        if node_id in self.nodes:
            raise ConfigError(f'node "{node_id}" is there twice')
        if "seed" in op_of(config).fields and config.seed is None:
            config = attrs.evolve(config, seed=self.seed)
        self.nodes[node_id] = Node(node_id, config, launch or Launch(), positions or {})
        return Ref(node_id)
