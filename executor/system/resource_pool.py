"""CPUs, memory and GPUs: this machine's, and those that running nodes use."""

from __future__ import annotations

import os
from collections.abc import Mapping

from attrs import frozen

from dsl.finding import Field, Finding
from dsl.graph import GraphNode
from dsl.launch import Launch, Machine, memory_bytes
from dsl.memory import machine_memory
from dsl.shown import shown_bytes
from executor.system.hardware import NO_GPU, gpu_indices, may_have_gpu

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
REMEDY = "request less, or run it on a larger machine; [machine] limits what a run may use of this one"


@frozen
class Share:
    """The part of the machine that a node gets. threads: per rank. gpus: the devices it sees, None for all."""

    threads: int
    gpus: tuple[str, ...] | None = None


@frozen
class Demand:
    """The resources that a node uses while it runs. gpus: None for a node that reserves none and sees all."""

    cpus: int
    memory: int = 0
    gpus: int | None = None

    def __str__(self) -> str:
        return amounts(self.cpus, self.gpus or 0, self.memory)


@frozen
class Capacity:
    """The resources that the nodes of a run may use together. gpus: device names as in CUDA_VISIBLE_DEVICES.

    takes_none: `[machine]` gives the run no GPU, so nodes see none. Otherwise, if gpus is empty, nodes see what CUDA
    finds without a driver that lists devices.
    """

    cpus: int
    memory: int
    gpus: tuple[str, ...]
    takes_none: bool = False

    def __str__(self) -> str:
        return amounts(self.cpus, len(self.gpus), self.memory)

    def demand(self, node: GraphNode, useful: int | None = None) -> Demand:
        """The resources of all parts of a node."""
        part, parts = self.part(node, useful), node.launch.parts
        return Demand(part.cpus * parts, part.memory * parts, None if part.gpus is None else part.gpus * parts)

    def part(self, node: GraphNode, useful: int | None = None) -> Demand:
        """The resources of one part of a node; a part runs on one host.

        CPUs: its threads where they are limited, else all of the host: heavy nodes run one at a time. useful: the most
        threads of a process that its op can use, None for no limit.
        """
        launch = node.launch
        limited = (launch.threads or useful or 0) * launch.processes_of_part
        own = Demand(
            launch.cpus or min(limited or self.cpus, self.cpus), memory_bytes(launch) or 0, self._gpus_of(node)
        )
        pool = launch.pool
        if pool is None:
            return own
        cpus = own.cpus + pool.workers * (pool.cpus or pool.threads)
        return Demand(
            cpus if launch.cpus and pool.cpus else min(cpus, self.cpus),
            own.memory + pool.workers * (memory_bytes(pool) or 0),
            own.gpus and own.gpus + pool.workers,
        )

    def threads(self, node: GraphNode, useful: int | None = None) -> int:
        """CPU threads of each process of a node, see `threads_of`."""
        return threads_of(node.launch, Machine(cpus=self.cpus), useful)

    @classmethod
    def of_this_machine(cls, machine: Machine) -> Capacity:
        """The resources of this machine, or those in `[machine]`, which may declare more CPUs or memory than exist."""
        gpus = devices()
        return cls(
            machine.cpus or len(os.sched_getaffinity(0)),
            memory_bytes(machine) or machine_memory(),
            gpus if machine.gpus is None else gpus[: machine.gpus],
            machine.gpus == 0,
        )

    def _gpus_of(self, node: GraphNode) -> int | None:
        """The number of GPUs for one part of a node; None for all that CUDA finds without a driver.

        It is launch.gpus if set, else one for each process of an op that computes on GPUs, else 0.
        """
        if node.launch.gpus is not None:
            return node.launch.gpus
        if not computes_on_gpu(node):
            return 0
        if not self.gpus and node.launch.device == "auto":
            return 0 if self.takes_none else None
        return node.launch.processes_of_part if self.gpus or self.takes_none else None


class Free:
    """The resources that no running node uses."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._cpus = capacity.cpus
        self._memory = capacity.memory
        self._gpus = set(capacity.gpus)

    def __str__(self) -> str:
        return amounts(self._cpus, len(self._gpus), self._memory)

    def fits(self, demand: Demand) -> bool:
        return demand.cpus <= self._cpus and demand.memory <= self._memory and (demand.gpus or 0) <= len(self._gpus)

    def take(self, demand: Demand, threads: int) -> Share:
        """Reserve a share of that size, with the first free GPUs."""
        self._cpus -= demand.cpus
        self._memory -= demand.memory
        if demand.gpus is None:
            return Share(threads)
        gpus = tuple(gpu for gpu in self._capacity.gpus if gpu in self._gpus)[: demand.gpus]
        self._gpus -= set(gpus)
        return Share(threads, gpus)

    def give_back(self, demand: Demand, share: Share) -> None:
        self._cpus += demand.cpus
        self._memory += demand.memory
        self._gpus |= set(share.gpus or ())


def computes_on_gpu(node: GraphNode) -> bool:
    """Whether the node uses a GPU if there is one: device is "cuda", or "auto" with an op that computes on GPUs."""
    device = node.launch.device
    return device == "cuda" or (device == "auto" and node.op.gpu)


def device_order() -> dict[str, str]:
    """The environment variable that makes CUDA number devices as the driver does.

    By default CUDA numbers the fastest device 0. Empty where the user has chosen devices or an order.
    """
    return {} if VISIBLE in os.environ or ORDER in os.environ else {ORDER: "PCI_BUS_ID"}


def threads_of(launch: Launch, machine: Machine | None = None, useful: int | None = None) -> int:
    """The CPU threads of each rank: launch.threads, else the node's or the run's CPUs divided by the ranks.

    useful: the most that the op can use. The value does not depend on other running nodes, since threads change
    rounding.
    """
    cpus = launch.cpus or (machine and machine.cpus) or len(os.sched_getaffinity(0))
    share = max(1, cpus // launch.processes_of_part)
    return launch.threads or (share if useful is None else min(share, useful))


def too_much(nodes: Mapping[str, GraphNode], capacity: Capacity, remedy: str = REMEDY) -> list[Finding]:
    """Mistakes for nodes that could never start, since a part needs more than a host has for the run."""
    mistakes = []
    for node_id, node in nodes.items():
        demand, launch = capacity.part(node), node.launch
        processes = launch.processes_of_part
        if launch.gpus and launch.gpus < processes and computes_on_gpu(node):
            message = f"{_amount(launch.gpus, 'GPU')} for {processes} ranks, each of which needs one"
            hint = f"set gpus = {processes}, or leave gpus out"
            mistakes.append(Finding(message, Field(f"node.{node_id}.launch.gpus"), hint))
        for field, unit, requested, available, hint in (
            ("cpus", "CPU", demand.cpus, capacity.cpus, remedy),
            (_gpu_field(launch), "GPU", demand.gpus or 0, len(capacity.gpus), _fewer_gpus(launch, len(capacity.gpus))),
            ("memory", "", demand.memory, capacity.memory, remedy),
        ):
            if requested > available:
                message = f"needs {_amount(requested, unit)}, but the run may use only {_amount(available, unit)}"
                mistakes.append(Finding(message, Field(f"node.{node_id}.launch.{field}"), hint))
    return mistakes


def without_gpu(nodes: Mapping[str, GraphNode], capacity: Capacity) -> list[Finding]:
    """Mistakes for nodes that insist on a GPU of a machine that has none."""
    if capacity.gpus or capacity.takes_none or (VISIBLE not in os.environ and may_have_gpu()):
        return []
    return [
        Finding(NO_GPU, Field(f"node.{node_id}.launch.device"))
        for node_id, node in nodes.items()
        if node.launch.device == "cuda"
    ]


def devices() -> tuple[str, ...]:
    """The GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, else all that the driver lists."""
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return gpu_indices()
    names = [name.strip() for name in visible.split(",")]
    end = next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))
    return tuple(names[:end])


def amounts(cpus: int, gpus: int, memory: int) -> str:
    """Resources as text, "2 CPUs, 0 GPUs, 24.0 GB". memory: bytes; left out if 0."""
    return ", ".join([_amount(cpus, "CPU"), _amount(gpus, "GPU"), *([_amount(memory, "")] if memory else [])])


def _gpu_field(launch: Launch) -> str:
    """The field of the launch that sets how many GPUs a node uses."""
    if launch.gpus is not None:
        return "gpus"
    if launch.shard_workers > 1:
        return "shard_workers"
    return "nproc" if launch.nproc > 1 else "device"


def _fewer_gpus(launch: Launch, available: int) -> str:
    """A hint for a node that needs more GPUs than are available."""
    if launch.gpus is not None or launch.nproc == 1:
        return REMEDY
    ranks = available - available % launch.sp_degree
    fewer = [f"nproc = {ranks}"] if ranks else []
    if available and not ranks:
        fewer = [f"nproc = {available} with sp_degree = {available}"]
    return "each rank needs one: set " + " or ".join([*fewer, 'device = "cpu"'])


def _amount(number: int, unit: str) -> str:
    """The text of a number with its unit. unit: empty for bytes."""
    return f"{number} {unit}{'s' * (number != 1)}" if unit else shown_bytes(number)
