"""What the nodes of a run take of this machine while they run, and what it has."""

from __future__ import annotations

import os
from collections.abc import Mapping

from attrs import frozen

from dsl.errors import Mistake
from dsl.graph import GraphNode
from dsl.launch import Launch, Machine
from dsl.sizes import shown_bytes
from executor.system.hardware import gpu_indices, machine_memory
from executor.system.slurm import hosts_allocated, more_hosts, too_few

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
WAY_OUT = "ask for less, or run it on a larger machine; [machine] says what a run may use of this one"


@frozen
class Share:
    """A node's part of the machine: threads of each rank; gpus: the devices it sees, None for all of them."""

    threads: int
    gpus: tuple[str, ...] | None = None


@frozen
class Demand:
    """What a node takes while it runs. gpus is None for a node that takes none and yet sees all."""

    cpus: int
    memory: int = 0
    gpus: int | None = None


@frozen
class Capacity:
    """What a run may use together. gpus are the devices by the names that CUDA_VISIBLE_DEVICES takes.

    takes_none: `[machine]` gives the run no GPU, so that its nodes see none; else, where gpus is empty, they see what
    CUDA finds without a driver that lists them.
    """

    cpus: int
    memory: int
    gpus: tuple[str, ...]
    takes_none: bool = False

    @classmethod
    def of_this_machine(cls, machine: Machine) -> Capacity:
        """What is there, or as much of it as `[machine]` says. More CPUs or memory than there is can be declared."""
        gpus = devices()
        return cls(
            machine.cpus or len(os.sched_getaffinity(0)),
            machine.memory_bytes or machine_memory(),
            gpus if machine.gpus is None else gpus[: machine.gpus],
            machine.gpus == 0,
        )

    def demand(self, node: GraphNode, useful: int | None = None) -> Demand:
        """Of the CPUs a node takes those of its threads where they are limited, else all: heavy nodes run alone.

        useful: the most threads of a rank that its op makes use of, None for as many as there are.
        """
        launch = node.launch
        cpus = launch.cpus or min((launch.threads or useful or 0) * launch.nproc or self.cpus, self.cpus)
        return Demand(cpus, launch.memory_bytes or 0, self._gpus_of(node))

    def _gpus_of(self, node: GraphNode) -> int | None:
        """A GPU for each rank of an op that computes on one; an op that does not sees none unless it asks for some."""
        if node.launch.gpus is not None:
            return node.launch.gpus
        if not computes_on_gpu(node):
            return 0
        if not self.gpus and node.launch.device == "auto":
            return 0 if self.takes_none else None
        return node.launch.nproc if self.gpus or self.takes_none else None


class Free:
    """What no running node has taken."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._cpus = capacity.cpus
        self._memory = capacity.memory
        self._gpus = set(capacity.gpus)

    def fits(self, demand: Demand) -> bool:
        return demand.cpus <= self._cpus and demand.memory <= self._memory and (demand.gpus or 0) <= len(self._gpus)

    def take(self, demand: Demand, threads: int) -> Share:
        """A share of that size, the first GPUs that are free among it."""
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
    """Whether the node takes a GPU where there is one: by its op and its device, or by device = "cuda" alone."""
    device = node.launch.device
    return device == "cuda" or (device == "auto" and node.op.gpu)


def device_order() -> dict[str, str]:
    """The environment variable by which the numbers that the driver lists name the same devices for CUDA.

    CUDA numbers the fastest device 0. Who has chosen devices or an order for dflow is left with what that means.
    """
    return {} if VISIBLE in os.environ or ORDER in os.environ else {ORDER: "PCI_BUS_ID"}


def threads_of(launch: Launch, machine: Machine | None = None, useful: int | None = None) -> int:
    """CPU threads of each rank: as given, else the node's CPUs, or all that the run may use, divided by the ranks.

    useful: what the op makes use of at most. What else runs meanwhile does not count: threads change the rounding.
    """
    cpus = launch.cpus or (machine and machine.cpus) or len(os.sched_getaffinity(0))
    share = max(1, cpus // launch.nproc)
    return launch.threads or (share if useful is None else min(share, useful))


def too_much(nodes: Mapping[str, GraphNode], machine: Machine) -> list[Mistake]:
    """What nodes ask for beyond what a run may use: they could never start."""
    capacity, allocated = Capacity.of_this_machine(machine), hosts_allocated()
    mistakes = []
    for node_id, node in nodes.items():
        if allocated is not None and 1 < node.launch.nnodes > allocated:
            message = too_few(node.launch.nnodes, allocated)
            mistakes.append(Mistake(message, f"node.{node_id}.launch.nnodes", hint=more_hosts(node.launch.nnodes)))
        demand, launch = capacity.demand(node), node.launch
        if launch.gpus and launch.gpus < launch.nproc and computes_on_gpu(node):
            message = f"{_amount(launch.gpus, 'GPU')} for {launch.nproc} ranks, each of which takes one"
            hint = f"give gpus = {launch.nproc}, or leave gpus out"
            mistakes.append(Mistake(message, f"node.{node_id}.launch.gpus", hint=hint))
        for field, unit, asked, there, hint in (
            ("cpus", "CPU", demand.cpus, capacity.cpus, WAY_OUT),
            (_gpu_field(launch), "GPU", demand.gpus or 0, len(capacity.gpus), _fewer_gpus(launch, len(capacity.gpus))),
            ("memory", "", demand.memory, capacity.memory, WAY_OUT),
        ):
            if asked > there:
                message = f"asks for {_amount(asked, unit)}, but the run may use {_amount(there, unit)}"
                mistakes.append(Mistake(message, f"node.{node_id}.launch.{field}", hint=hint))
    return mistakes


def devices() -> tuple[str, ...]:
    """The GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, else all that the driver lists."""
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return gpu_indices()
    names = [name.strip() for name in visible.split(",")]
    end = next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))
    return tuple(names[:end])


def _gpu_field(launch: Launch) -> str:
    """The field of the launch that says how many GPUs a node takes."""
    if launch.gpus is not None:
        return "gpus"
    return "nproc" if launch.nproc > 1 else "device"


def _fewer_gpus(launch: Launch, there: int) -> str:
    """What helps a node that takes more GPUs than there are."""
    if launch.gpus is not None or launch.nproc == 1:
        return WAY_OUT
    ranks = there - there % launch.sp_degree
    fewer = [f"nproc = {ranks}"] if ranks else []
    if there and not ranks:
        fewer = [f"nproc = {there} with sp_degree = {there}"]
    return "each rank takes one: give " + " or ".join([*fewer, 'device = "cpu"'])


def _amount(number: int, unit: str) -> str:
    """unit: empty for bytes."""
    return f"{number} {unit}{'s' * (number != 1)}" if unit else shown_bytes(number)
