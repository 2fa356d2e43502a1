"""What a cluster of several hosts has, and whether the parts of a node fit on it."""

from __future__ import annotations

import attrs

from dsl.finding import Field, Finding
from dsl.graph import GraphNode
from executor.system.resource_pool import Capacity, Demand, computes_on_gpu, too_much

REMEDY = "request less for each host, or add larger hosts to the cluster"


@attrs.frozen
class ClusterCapacity(Capacity):
    """What all hosts of a cluster have. hosts: each of them; a part of a stage runs on one.

    The numbers of GPUs count those of all hosts; which devices a part gets is decided where it starts.
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
        """What keeps the node from ever starting."""
        found = too_much({node.id: node}, self._host_for(node), REMEDY)
        launch, room = node.launch, self._rooms(self.part(node))
        if found or room >= launch.parts:
            return found
        field = "hosts" if launch.hosts > 1 else "shard_workers"
        message = f"needs room for {launch.parts} parts, but the hosts of the cluster have room for {room}"
        hint = f"set {field} = {max(1, room)}, or fewer cpus, threads or gpus for each; or add hosts"
        return [Finding(message, Field(f"node.{node.id}.launch.{field}"), hint)]

    def _host_for(self, node: GraphNode) -> Capacity:
        """What a part of the node may use: the largest host that makes parts of which all fit, else the largest.

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
        """How many parts of that size the hosts have room for."""
        rooms = 0
        for host in self.hosts:
            fits = [host.cpus // max(1, part.cpus)]
            fits += [host.memory // part.memory] if part.memory else []
            fits += [len(host.gpus) // part.gpus] if part.gpus else []
            rooms += min(fits)
        return rooms
