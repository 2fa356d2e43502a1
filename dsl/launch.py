"""How a stage runs and what the run may use of this machine, never part of a key; and the tables of a pipeline file
beside its nodes: the pipeline itself, MLflow and the machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs import frozen, validators

from dsl.convert import accept_old_words
from dsl.errors import ConfigError, did_you_mean, shortened
from dsl.op import ConfigField, config_fields
from dsl.shown import parsed_bytes, shown_value

ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
PORTS = range(1, 65536)
OWN_CLUSTER = "local"
Kind = Literal["process", "ranks", "ray"]
accept_old_words(Kind, {"torchrun": "ranks"})


def is_address(value: str) -> bool:
    """Whether a text is "host:port"."""
    found = ADDRESS.fullmatch(value)
    return found is not None and int(found[1]) in PORTS


def cluster_mistake(value: str) -> str:
    """A text on what is wrong with the name of a Ray cluster; empty if it is valid."""
    if value == OWN_CLUSTER or is_address(value):
        return ""
    allowed = '"local" (a cluster of dflow\'s own on this machine) or "HOST:PORT" of a cluster\'s head'
    if value == "auto":
        return f'"auto" would join whatever cluster is found; give {allowed}'
    return f'expected {allowed}, got "{shortened(value)}"'


def _needs_ranks(launch: Launch, field: attrs.Attribute[int], value: int) -> None:
    if value > 1 and launch.kind == "process":
        raise ValueError(f'{field.name} > 1 needs kind = "ranks" or "ray"')


def _needs_ray(launch: Launch, field: attrs.Attribute[int], value: int) -> None:
    if value > 1 and launch.kind != "ray":
        raise ValueError(f'{field.name} > 1 needs kind = "ray"')


def _is_alone(launch: Launch, field: attrs.Attribute[int], value: int) -> None:
    if value > 1 and (launch.nproc > 1 or launch.hosts > 1):
        raise ValueError(
            "workers that share shards are processes of one rank each; leave nproc and hosts out, or shard_workers"
        )


def _is_cluster(machine: Machine, field: attrs.Attribute[str], value: str) -> None:
    if mistake := cluster_mistake(value):
        raise ValueError(mistake)


def _makes_whole_groups(launch: Launch, field: attrs.Attribute[int], sp_degree: int) -> None:
    """A validator: nproc must be a multiple of sp_degree, so that groups of ranks stay on one host."""
    if launch.nproc < sp_degree:
        remedy = f"take nproc = {sp_degree} or a multiple of it, or a smaller sp_degree"
        raise ValueError(f"fewer ranks than the mesh needs: nproc = {launch.nproc}, sp_degree = {sp_degree}; {remedy}")
    if launch.nproc % sp_degree:
        below = launch.nproc - launch.nproc % sp_degree
        remedy = f"take nproc = {below} or {below + sp_degree}, or another sp_degree"
        raise ValueError(f"nproc = {launch.nproc} is not a multiple of sp_degree = {sp_degree}; {remedy}")


def _has_ranks(launch: Launch, field: attrs.Attribute[Any], pool: Pool | None) -> None:
    if pool is not None and launch.kind == "process":
        raise ValueError('a pool works for ranks: set kind = "ranks"')
    if pool is not None and launch.kind == "ray":
        raise ValueError('a pool is on one machine: set kind = "ranks", or leave pool out')
    if pool is not None and launch.shard_workers > 1:
        raise ValueError("workers that share shards have no pool; leave shard_workers out")


def _fits_device(launch: Launch, field: attrs.Attribute[Any], value: int | None) -> None:
    if value and launch.device == "cpu":
        raise ValueError('device = "cpu" does not use GPUs; leave gpus out, or set device = "auto"')


def _is_size(instance: Any, field: attrs.Attribute[Any], value: str | None) -> None:
    if value is not None:
        if not isinstance(value, str):
            raise ValueError(f'expected a text such as "24 GiB", got {shown_value(value)}')
        parsed_bytes(value)


def _is_duration(instance: Any, field: attrs.Attribute[float], value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"expected seconds, 0 or more, got {value}")


@frozen(kw_only=True)
class Pool:
    """Processes beside the ranks of a stage that compute for them and keep nothing: any number gives the same result.

    threads are the CPU threads of each: 1 as those of a rank that computes for itself, since another number changes
    rounding on a CPU. cpus and memory are what each takes of `[machine]`, or of a host; cpus = 0: as many as threads.
    If the stage computes on GPUs, each takes one. A worker that is killed is started again launch.retries times.
    """

    workers: int = attrs.field(validator=validators.ge(1))
    threads: int = attrs.field(default=1, validator=validators.ge(1))
    cpus: int = attrs.field(default=0, validator=validators.ge(0))
    memory: str | None = attrs.field(default=None, validator=_is_size)


@frozen(kw_only=True)
class Launch:
    """How a stage runs, not what it computes: outside the key, recorded in the manifest.

    kind "process" runs one process; "ranks" runs nproc ranks on this machine; "ray" runs nproc ranks on each of
    hosts machines of a Ray cluster. Groups of sp_degree ranks share every sequence, for ops that do sequence
    parallelism; nproc is a multiple of it, so that a group is on one machine. shard_workers: processes that share the
    shards of an op that makes such, on this machine or anywhere in the cluster. threads are CPU threads per rank (0:
    what the op uses, at most the cores divided by the ranks). pool: workers that compute for the ranks, for ops that
    have such. device "auto" takes cuda where there is one.

    gpus, cpus and memory ("24 GiB") are what the stage takes of `[machine]` while it runs, or of each host of a
    cluster, so that nodes that fit together run side by side. Without gpus, an op that computes on a GPU takes one
    for each rank, and others see none unless device is "cuda". An attempt ends after timeout seconds (0: never). An
    attempt that ends with a transient error is retried retries times, first after retry_wait seconds, then each time
    after twice as long.
    """

    kind: Kind = "process"
    nproc: int = attrs.field(default=1, validator=[validators.ge(1), _needs_ranks])
    hosts: int = attrs.field(default=1, validator=[validators.ge(1), _needs_ray])
    sp_degree: int = attrs.field(default=1, validator=[validators.ge(1), _needs_ranks, _makes_whole_groups])
    shard_workers: int = attrs.field(default=1, validator=[validators.ge(1), _is_alone])
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = attrs.field(default=0, validator=validators.ge(0))
    pool: Pool | None = attrs.field(default=None, validator=_has_ranks)
    gpus: int | None = attrs.field(default=None, validator=[validators.optional(validators.ge(0)), _fits_device])
    cpus: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(1)))
    memory: str | None = attrs.field(default=None, validator=_is_size)
    retries: int = attrs.field(default=2, validator=validators.ge(0))
    retry_wait: float = attrs.field(default=10.0, validator=_is_duration)
    timeout: float = attrs.field(default=0.0, validator=_is_duration)

    @property
    def world_size(self) -> int:
        """The number of ranks on all hosts."""
        return self.nproc * self.hosts

    @property
    def parts(self) -> int:
        """The number of a stage's parts that may run on different machines: hosts, or shard workers on a cluster."""
        return max(self.hosts, self.shard_workers) if self.kind == "ray" else 1

    @property
    def processes_of_part(self) -> int:
        return self.processes // self.parts

    @property
    def processes(self) -> int:
        """The number of processes that report how they ended: ranks, or workers that share shards."""
        return max(self.world_size, self.shard_workers)

    @property
    def pool_workers(self) -> int:
        return 0 if self.pool is None else self.pool.workers


@frozen(kw_only=True)
class Machine:
    """The table `[machine]`: what the nodes of a run may use of this machine together; None: all that there is.

    ray: the cluster of nodes with kind = "ray", as "HOST:PORT" of its head, or "local" for one of dflow's own here.
    ray_without_authentication: use that cluster even if it lets anyone in without a token.
    """

    cpus: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(1)))
    gpus: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(0)))
    memory: str | None = attrs.field(default=None, validator=_is_size)
    ray: str = attrs.field(default=OWN_CLUSTER, validator=_is_cluster)
    ray_without_authentication: bool = False


def memory_bytes(table: Launch | Machine | Pool) -> int | None:
    """The bytes of the table's `memory`; None where it is not set."""
    return None if table.memory is None else parsed_bytes(table.memory)


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
