"""How a stage runs, and what the run may use of this machine: never part of a key."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import attrs
from attrs import frozen, validators

from dsl.errors import shortened
from dsl.shown import shown_value
from dsl.sizes import parsed_bytes

ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
PORTS = range(1, 65536)


def _needs_torchrun(launch: Launch, field: attrs.Attribute[int], value: int) -> None:
    if value > 1 and launch.kind != "torchrun":
        raise ValueError(f'{field.name} > 1 needs kind = "torchrun"')


def _makes_whole_groups(launch: Launch, field: attrs.Attribute[int], sp_degree: int) -> None:
    """The ranks of a machine form a mesh of nproc / sp_degree groups with sp_degree ranks each."""
    if launch.nproc < sp_degree:
        remedy = f"take nproc = {sp_degree} or a multiple of it, or a smaller sp_degree"
        raise ValueError(f"fewer ranks than the mesh needs: nproc = {launch.nproc}, sp_degree = {sp_degree}; {remedy}")
    if launch.nproc % sp_degree:
        below = launch.nproc - launch.nproc % sp_degree
        remedy = f"take nproc = {below} or {below + sp_degree}, or another sp_degree"
        raise ValueError(f"nproc = {launch.nproc} is not a multiple of sp_degree = {sp_degree}; {remedy}")


def _is_address(launch: Launch, field: attrs.Attribute[str], value: str) -> None:
    if not value:
        return
    found = ADDRESS.fullmatch(value)
    if found is None or int(found[1]) not in PORTS:
        raise ValueError(f'expected "host:port" with a port of 1 to 65535, got "{shortened(value)}"')
    if launch.nnodes < 2:
        raise ValueError("a rendezvous needs nnodes > 1")


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
class Launch:
    """How a stage runs, not what it computes: outside the key, recorded in the manifest.

    kind "process" runs one process; "torchrun" runs nproc ranks on each of nnodes machines, which meet at rendezvous
    ("host:port" of the one that dflow runs on). Groups of sp_degree ranks share every sequence, for ops that do
    sequence parallelism; nproc is a multiple of it, so that a group lies on one machine. threads are CPU threads per
    rank (0: what the op uses, at most the cores divided by the ranks). device "auto" takes cuda where there is
    one.

    gpus, cpus and memory ("24 GiB") are what the stage takes of `[machine]` while it runs, so that nodes that fit
    together run side by side. Without gpus, an op that computes on a GPU takes one for each rank, and others see none
    unless device is "cuda". An attempt ends after timeout seconds (0: never). An attempt that ends with a
    transient error is retried retries times, first after retry_wait seconds, then each time after twice as long.
    """

    kind: Literal["process", "torchrun"] = "process"
    nproc: int = attrs.field(default=1, validator=[validators.ge(1), _needs_torchrun])
    nnodes: int = attrs.field(default=1, validator=[validators.ge(1), _needs_torchrun])
    rendezvous: str = attrs.field(default="", validator=_is_address)
    sp_degree: int = attrs.field(default=1, validator=[validators.ge(1), _needs_torchrun, _makes_whole_groups])
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = attrs.field(default=0, validator=validators.ge(0))
    gpus: int | None = attrs.field(default=None, validator=[validators.optional(validators.ge(0)), _fits_device])
    cpus: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(1)))
    memory: str | None = attrs.field(default=None, validator=_is_size)
    retries: int = attrs.field(default=2, validator=validators.ge(0))
    retry_wait: float = attrs.field(default=10.0, validator=_is_duration)
    timeout: float = attrs.field(default=0.0, validator=_is_duration)

    @property
    def world_size(self) -> int:
        """Ranks on all machines."""
        return self.nproc * self.nnodes

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parsed_bytes(self.memory)


@frozen(kw_only=True)
class Machine:
    """The table `[machine]`: what the nodes of a run may use of this machine together; None: all that there is."""

    cpus: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(1)))
    gpus: int | None = attrs.field(default=None, validator=validators.optional(validators.ge(0)))
    memory: str | None = attrs.field(default=None, validator=_is_size)

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parsed_bytes(self.memory)
