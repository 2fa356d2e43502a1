"""The backend of a Ray cluster, on the executor's side; this process does not import Ray.

Each stage has a driver of its own, a child of the forkserver (ray_driver.py): it dies with the executor, and Ray then
ends the actors that it owns, and with them the ranks. A cluster that goes away ends drivers, never the executor. The
cluster is one that exists, or one of dflow's own on this machine (ray_cluster.py), which ends with the executor.

    work/<key>/actors-<attempt>.json    Actors: what a later attempt has to find ended, except on a cluster of its own
"""

from __future__ import annotations

import importlib.util
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from dsl.convert import unstructure
from dsl.errors import LeaseLost, Mistake, StageError
from dsl.graph import GraphNode
from dsl.launch import OWN_CLUSTER, Launch, Machine
from executor.launchers.backend import HostsExit, StageOrder
from executor.launchers.cluster_address import cluster_address
from executor.launchers.forkserver_client import Child, Children
from executor.launchers.ray_cluster import (
    ACTORS,
    HOSTS,
    Actors,
    OwnCluster,
    actor_names,
    actors_path,
    find_hosts,
    unended,
)
from executor.launchers.stage_environment import stage_environment
from executor.system.jsonlines import read_object, write_json
from executor.system.resource_pool import Capacity, Demand, too_much

REMEDY = "request less for each host, or add larger hosts to the cluster"


@attrs.frozen
class ClusterCapacity(Capacity):
    """What all hosts of a cluster have. hosts: each of them; a part of a stage runs on one."""

    hosts: tuple[Capacity, ...] = ()

    @classmethod
    def of(cls, hosts: tuple[Capacity, ...]) -> ClusterCapacity:
        gpus = tuple(str(number) for number in range(sum(len(host.gpus) for host in hosts)))
        return cls(sum(host.cpus for host in hosts), sum(host.memory for host in hosts), gpus, hosts=hosts)

    def host_for(self, node: GraphNode) -> Capacity:
        """The smallest host that has room for a part of the node, else the largest."""
        by_size = sorted(self.hosts, key=lambda host: (len(host.gpus), host.cpus, host.memory))
        return next((host for host in by_size if not too_much({node.id: node}, host)), by_size[-1])

    def demand(self, node: GraphNode, useful: int | None = None) -> Demand:
        part, parts = self.host_for(node).demand(node, useful), node.launch.parts
        gpus = None if part.gpus is None else part.gpus * parts
        return Demand(part.cpus * parts, part.memory * parts, gpus)

    def threads(self, node: GraphNode, useful: int | None = None) -> int:
        return self.host_for(node).threads(node, useful)


class RayBackend:
    """Implements Backend."""

    def __init__(self, machine: Machine, children: Children) -> None:
        self._machine = machine
        self._children = children
        self._own: OwnCluster | None = None
        self._capacity: Capacity | None = None
        self._lock = threading.Lock()

    @property
    def is_own(self) -> bool:
        """Whether the cluster is one of dflow's own on this machine."""
        return cluster_address(self._machine) == OWN_CLUSTER

    def capacity(self) -> Capacity:
        """Raises StageError where the cluster cannot be reached."""
        with self._lock:
            if self._capacity is None:
                here = () if not self.is_own else (Capacity.of_this_machine(self._machine),)
                found = here or tuple(host.capacity for host in find_hosts(cluster_address(self._machine)))
                self._capacity = ClusterCapacity.of(found)
            return self._capacity

    def describe(self) -> str:
        """One line on what the cluster has, and what of it is free, or why that is not known."""
        if self.is_own:
            size = _amounts([Capacity.of_this_machine(self._machine)])
            return f"cluster: one of dflow's own on this machine, started with the first node that needs it: {size}"
        address = cluster_address(self._machine)
        try:
            hosts = find_hosts(address)
        except StageError as error:
            return str(error)
        size, free = _amounts([host.capacity for host in hosts]), _amounts([host.unused for host in hosts])
        return f"cluster {address}: {len(hosts)} host{'s' * (len(hosts) != 1)}, {size}; free now: {free}"

    def check(self, nodes: Mapping[str, GraphNode]) -> list[Mistake]:
        first = f"node.{next(iter(nodes))}.launch.kind"
        if importlib.util.find_spec("ray") is None:
            return [Mistake("Ray is not installed here", first, hint='pip install "dflow[ray]"')]
        try:
            capacity = self.capacity()
        except StageError as error:
            return [Mistake(str(error), first)]
        assert isinstance(capacity, ClusterCapacity)
        mistakes = []
        for node_id, node in nodes.items():
            found = too_much({node_id: node}, capacity.host_for(node), REMEDY)
            mistakes += found or _too_many_parts(node, capacity)
        return mistakes

    def start(self, order: StageOrder) -> RayStage:
        file = order.private / "order.json"
        write_json(file, unstructure(order))
        with self._lock:
            if self.is_own and (self._own is None or self._own.is_gone):
                self._own = OwnCluster(Capacity.of_this_machine(self._machine))
        variables = self._own.variables if self._own is not None else {}
        address = self._own.address if self._own is not None else cluster_address(self._machine)
        if self._own is None:
            actors = Actors(address=address, names=tuple(actor_names(order)))
            write_json(actors_path(order), unstructure(actors))
        environment = {**stage_environment(1), **variables}
        child = self._children.start("executor.launchers.ray_driver", [str(file), address], environment, order.log)
        return RayStage(child, order, address)

    def recover(self, work: Path) -> None:
        for file in sorted(work.glob(f"{ACTORS}*.json")):
            actors = Actors.read(file)
            try:
                running = () if actors is None else unended(actors)
            except StageError as error:
                raise LeaseLost(f"{error}; once nothing of that cluster runs any more, remove {file}") from error
            if actors is not None and running:
                raise LeaseLost(
                    f"{work}: processes of an earlier attempt still run on the Ray cluster {actors.address} "
                    f"({', '.join(running)}); end them, or stop that cluster"
                )
            file.unlink()

    def close(self) -> None:
        if self._own is not None:
            self._own.close()


class RayStage:
    """Implements RunningStage: the driver of a stage."""

    def __init__(self, child: Child, order: StageOrder, address: str) -> None:
        self._child = child
        self._order = order
        self._address = address

    @property
    def pid(self) -> int | None:
        return None

    def wait(self, seconds: float) -> HostsExit | None:
        if not self._child.ended_within(seconds):
            return None
        found = read_object(self._order.results / HOSTS)
        if found is None:
            lost = f"the stage's driver on the Ray cluster {self._address} ended without a report; see the log"
            return HostsExit(code=self._child.code, lost=lost)
        return HostsExit(**{**found, "hosts": tuple(found["hosts"])})

    def request_stop(self) -> None:
        self._child.signal(signal.SIGTERM)

    def kill(self) -> None:
        self._child.signal(signal.SIGKILL, whole_group=True)


def _amounts(hosts: Sequence[Capacity]) -> str:
    """What they have together."""
    counts = {"CPU": sum(host.cpus for host in hosts), "GPU": sum(len(host.gpus) for host in hosts)}
    shown = [f"{count} {unit}{'s' * (count != 1)}" for unit, count in counts.items()]
    return ", ".join([*shown, f"{sum(host.memory for host in hosts) / 2**30:.1f} GiB"])


def _too_many_parts(node: GraphNode, capacity: ClusterCapacity) -> list[Mistake]:
    """A mistake where the cluster has no room for all parts of a node at once."""
    launch: Launch = node.launch
    room = 0
    for host in capacity.hosts:
        part = capacity.host_for(node).demand(node)
        rooms = [host.cpus // max(1, part.cpus)]
        rooms += [host.memory // part.memory] if part.memory else []
        rooms += [len(host.gpus) // part.gpus] if part.gpus else []
        room += min(rooms)
    if room >= launch.parts:
        return []
    field = "hosts" if launch.hosts > 1 else "shard_workers"
    message = f"needs room for {launch.parts} parts, but the hosts of the cluster have room for {room}"
    hint = f"set {field} = {max(1, room)}, or fewer cpus, threads or gpus for each; or add hosts"
    return [Mistake(message, f"node.{node.id}.launch.{field}", hint=hint)]
