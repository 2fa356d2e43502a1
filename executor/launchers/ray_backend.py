"""The backend of a Ray cluster, on the executor's side; this process does not import Ray.

Each stage has a driver of its own, a child process (ray_driver.py): it dies with the executor, and Ray then
ends the actors that it owns, and with them the ranks. A cluster that goes away ends drivers, never the executor. The
cluster is one that exists, or one of dflow's own on this machine (ray_cluster.py), which ends with the executor.

    work/<key>/actors-<attempt>.json    Actors: what a later attempt has to find ended, except on a cluster of its own
"""

from __future__ import annotations

import importlib.util
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import attrs

from dsl.convert import unstructure
from dsl.errors import ClusterError, LeaseLost, StageError, StopRequested
from dsl.files import appended, clear_errors, compact, write_json
from dsl.finding import Field, Finding
from dsl.graph import GraphNode
from dsl.launch import OWN_CLUSTER, Machine
from executor.launchers.backend import HostExit, StageOrder
from executor.launchers.cluster_address import USED, USED_OPEN, accepts_open, cluster_address, remember_cluster
from executor.launchers.host_run import stage_environment
from executor.launchers.ray_cluster import (
    HOSTS,
    PLACED,
    Actors,
    ClusterHost,
    GivenCluster,
    OwnCluster,
    actor_names,
    actors_path,
    find_hosts,
    listens,
    unended,
)
from executor.store.lease import ACTORS
from executor.system.resource_pool import Capacity, Demand, Share, computes_on_gpu, too_much
from executor.system.stage_mark import end_marked
from executor.system.supervisor import Child
from executor.system.trust import is_trusted

REMEDY = "request less for each host, or add larger hosts to the cluster"


class RayBackend:
    """The backend for a Ray cluster."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._own: OwnCluster | None = None
        self._lock = threading.Lock()

    @property
    def is_own(self) -> bool:
        """Whether the cluster is dflow's own, started on this machine."""
        return cluster_address(self._machine) == OWN_CLUSTER

    def capacity(self) -> ClusterCapacity:
        """The hosts' resources when the run started. Raises StageError for an unreachable or refused cluster."""
        if self.is_own:
            return ClusterCapacity.of((Capacity.of_this_machine(self._machine),))
        hosts = self._hosts()
        remember_cluster(self._machine)
        return ClusterCapacity.of(tuple(host.capacity for host in hosts))

    def _hosts(self) -> tuple[ClusterHost, ...]:
        return find_hosts(cluster_address(self._machine), accepts_open=accepts_open(self._machine))

    def describe(self) -> str:
        """A line on what the cluster has and how much of that is free, or why that is unknown."""
        if self.is_own:
            size = Capacity.of_this_machine(self._machine)
            return f"cluster: one of dflow's own on this machine, started with the first node that needs it: {size}"
        address = cluster_address(self._machine)
        try:
            hosts = self._hosts()
        except StageError as error:
            return str(error)
        size = ClusterCapacity.of(tuple(host.capacity for host in hosts))
        free = ClusterCapacity.of(tuple(host.unused for host in hosts))
        return f"cluster {address}: {len(hosts)} host{'s' * (len(hosts) != 1)}, {size}; free now: {free}"

    def check(self, nodes: Mapping[str, GraphNode]) -> list[Finding]:
        first = f"node.{next(iter(nodes))}.launch.kind"
        if importlib.util.find_spec("ray") is None:
            return [Finding("Ray is not installed here", Field(first), 'pip install "dflow[ray]"')]
        try:
            capacity = self.capacity()
        except StageError as error:
            return [Finding(str(error), Field(first))]
        return [mistake for node in nodes.values() for mistake in capacity.mistakes(node)]

    def start(self, order: StageOrder) -> RayStage:
        cluster = self._cluster()
        if isinstance(cluster, GivenCluster):
            order = attrs.evolve(order, share=Share(order.share.threads))  # its devices are not of this machine
            actors = Actors(address=cluster.address, names=tuple(actor_names(order)))
            write_json(actors_path(order), unstructure(actors))
        return RayStage(order, cluster)

    def _cluster(self) -> GivenCluster | OwnCluster:
        if not self.is_own:
            return GivenCluster(cluster_address(self._machine))
        with self._lock:
            if self._own is not None and self._own.is_gone:
                threading.Thread(target=self._own.close, name="end of a Ray cluster").start()  # may take seconds
                self._own = None
            if self._own is None:
                self._own = OwnCluster(Capacity.of_this_machine(self._machine))
            return self._own

    def recover(self, work: Path, go_on: Callable[[], None]) -> None:
        for file in sorted(work.glob(f"{ACTORS}*.json")):
            actors = Actors.read(file)
            running = () if actors is None else self._unended(actors, file, go_on)
            if actors is not None and running:
                raise LeaseLost(
                    f"{work}: processes of an earlier attempt still run on the Ray cluster {actors.address} "
                    f"({', '.join(running)}); end them, or stop that cluster"
                )
            file.unlink()

    def _unended(self, actors: Actors, file: Path, go_on: Callable[[], None]) -> tuple[str, ...]:
        """The actors in a file that could not be ended. Raises ClusterError for a cluster that only a file of the store
        names.
        """
        is_current = actors.address == cluster_address(self._machine)
        if not is_current and not is_trusted(USED, actors.address):
            raise ClusterError(
                f"{file} says that an earlier attempt ran on the Ray cluster {actors.address}, which was not used from "
                f"here; if it is yours, give --ray {actors.address}; else remove the file"
            )
        is_accepted = accepts_open(self._machine) if is_current else is_trusted(USED_OPEN, actors.address)
        return unended(actors, go_on, accepts_open=is_accepted)

    def close(self) -> None:
        with self._lock:
            if self._own is not None:
                self._own.close()


class RayStage:
    """A stage on a Ray cluster; its driver process starts once the cluster has started."""

    def __init__(self, order: StageOrder, cluster: GivenCluster | OwnCluster) -> None:
        self._order = order
        self._cluster = cluster
        self._driver: Child | None = None
        self._is_ending = False
        self._is_killed = False
        self._lock = threading.Lock()

    @property
    def is_placed(self) -> bool:
        return (self._order.results / PLACED).exists()

    def wait(self, seconds: float) -> HostExit | None:
        if self._driver is None:
            return self._start_within(seconds)
        if not self._driver.ended_within(seconds):
            return None
        return HostExit.read(self._order.results / HOSTS) or self._without_report(self._driver)

    def _start_within(self, seconds: float) -> HostExit | None:
        """Start the driver once the cluster has started; returns how the stage ended if the cluster never starts."""
        try:
            address = self._cluster.address_within(seconds)
        except StageError as error:
            return self._unstarted(HostExit(code=None, error=str(error)))
        with self._lock:
            if self._is_ending:
                return self._unstarted(HostExit(code=-signal.SIGTERM))
            if address is not None:
                order = compact(unstructure(self._order)).decode()
                environment = {**stage_environment(1), **self._cluster.variables}
                with clear_errors(self._order.log), appended(self._order.log) as log:
                    self._driver = Child("executor.launchers.ray_driver", [order, address], environment, log.fileno())
        return None

    def _unstarted(self, how: HostExit) -> HostExit:
        actors_path(self._order).unlink(missing_ok=True)
        return how

    def _without_report(self, driver: Child) -> HostExit:
        """The exit of a stage whose driver was killed without a report.

        Its actors end without it, and so do their ranks, which are not waited for here.
        """
        end_marked(self._order.folder)
        if isinstance(self._cluster, GivenCluster) and actors_path(self._order).exists():
            actors = Actors(address=self._cluster.address, names=tuple(actor_names(self._order)))
            if not listens(actors.address):  # its raylets end soon; the next attempt waits for them
                return HostExit(code=driver.code, lost=f"the head of the Ray cluster {actors.address} is gone")
            with suppress(StageError, StopRequested):  # the next attempt asks again
                if not unended(actors, self._go_on, accepts_open=True):  # where they were started
                    actors_path(self._order).unlink(missing_ok=True)
        address = self._cluster.address_within(0)
        lost = f"the stage's driver on the Ray cluster {address} ended without a report; see the log"
        return HostExit(code=driver.code, lost=lost)

    def _go_on(self) -> None:
        if self._is_killed:
            raise StopRequested("the stage was killed")

    def request_stop(self) -> None:
        with self._lock:
            self._is_ending = True
            if self._driver is not None:
                self._driver.signal(signal.SIGTERM)

    def kill(self) -> None:
        with self._lock:
            self._is_ending = self._is_killed = True
            if self._driver is not None:
                self._driver.signal(signal.SIGKILL, whole_group=True)


@attrs.frozen
class ClusterCapacity(Capacity):
    """The resources of all hosts of a cluster. hosts: those of each host; a part of a stage runs on one host.

    GPUs are numbered over all hosts; a part learns its devices only where it starts.
    """

    hosts: tuple[Capacity, ...] = ()

    @classmethod
    def of(cls, hosts: tuple[Capacity, ...]) -> ClusterCapacity:
        gpus = tuple(str(number) for number in range(sum(len(host.gpus) for host in hosts)))
        return cls(sum(host.cpus for host in hosts), sum(host.memory for host in hosts), gpus, hosts=hosts)

    def part(self, node: GraphNode, useful: int | None = None) -> Demand:
        return self._host_for(node).part(node, useful)

    def threads(self, node: GraphNode, useful: int | None = None) -> int:
        return self._host_for(node).threads(node, useful)

    def mistakes(self, node: GraphNode) -> list[Finding]:
        """Mistakes that keep the node from ever starting on this cluster."""
        found = too_much({node.id: node}, self._host_for(node), REMEDY)
        launch, room = node.launch, self._rooms(self.part(node))
        if found or room >= launch.parts:
            return found
        field = "hosts" if launch.hosts > 1 else "shard_workers"
        message = f"needs room for {launch.parts} parts, but the hosts of the cluster have room for {room}"
        hint = f"set {field} = {max(1, room)}, or fewer cpus, threads or gpus for each; or add hosts"
        return [Finding(message, Field(f"node.{node.id}.launch.{field}"), hint)]

    def _host_for(self, node: GraphNode) -> Capacity:
        """The resources that a part of the node may use on one host: the largest host on which all parts fit, else the
        largest.

        A part without limits takes a whole host. Workers that share shards divide the CPUs of the hosts.
        """
        launch = node.launch
        uses_gpus = computes_on_gpu(node) if launch.gpus is None else launch.gpus > 0
        hosts = [host for host in self.hosts if host.gpus or not uses_gpus] or list(self.hosts)
        hosts.sort(key=lambda host: (host.cpus, host.memory), reverse=True)
        divided = launch.shard_workers > 1 and not (launch.cpus or launch.threads)
        each = -(-launch.parts // len(hosts)) if divided else 1
        sizes = [attrs.evolve(host, cpus=max(1, host.cpus // each)) for host in hosts]
        return next((size for size in sizes if self._rooms(size.part(node)) >= launch.parts), sizes[0])

    def _rooms(self, part: Demand) -> int:
        """The number of parts of this size for which the hosts have room."""
        rooms = 0
        for host in self.hosts:
            fits = [host.cpus // max(1, part.cpus)]
            fits += [host.memory // part.memory] if part.memory else []
            fits += [len(host.gpus) // part.gpus] if part.gpus else []
            rooms += min(fits)
        return rooms
