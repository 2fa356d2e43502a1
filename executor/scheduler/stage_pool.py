"""The attempts that run now, side by side within what the run may use of this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from attrs import frozen

from dsl.errors import ConfigError
from dsl.estimate import useful_threads
from dsl.graph import Graph, GraphNode
from executor.launchers.backend import Backend
from executor.launchers.backends import Backends
from executor.records.run_record import Record
from executor.scheduler.attempt import Attempt
from executor.scheduler.plain_display import Display
from executor.scheduler.task import AttemptResult, AttemptStart, Task
from executor.store.artifact_store import Store
from executor.system.resource_pool import Capacity, Demand, Free, Share
from executor.system.shared_cores import SharedCores

ENDED_WITHIN_S = 10.0
# What ops import of the libraries that their keys name, which takes seconds.
HEAVY = {
    "torch": ("torch", "torch.distributed.tensor"),
    "transformers": ("transformers.modeling_utils", "transformers.models.qwen3_vl.modeling_qwen3_vl"),
}


@frozen
class Reservation:
    """The resources held for an attempt at a node. demand: of the whole node. part: of each of `launch.parts`."""

    room: Free
    cores: SharedCores | None
    demand: Demand
    share: Share
    part: Demand

    def give_back(self, *, was_used: bool) -> None:
        """Release the room and the cores. was_used: whether a stage used them, and has ended."""
        self.room.give_back(self.demand, self.share)
        if self.cores is not None:
            self.cores.give_back(self.demand.cpus, was_used=was_used)


class StagePool:
    """Starts, watches and ends attempts; only the loop's thread calls it."""

    def __init__(
        self,
        store: Store,
        graph: Graph,
        record: Record,
        display: Display,
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        """Create a pool without attempts. call: runs a function in the loop's thread."""
        self.running: dict[str, Attempt] = {}
        self._useful: dict[str, int | None] = {}
        self._told: set[str] = set()  # descriptions of clusters
        self._store = store
        self._graph = graph
        self._record = record
        self._display = display
        self._call = call
        self._backends = Backends(graph.machine)
        self._free: dict[Backend, Free] = {}
        self._cores = SharedCores(self._backends.here.capacity().cpus)

    def reserve(self, node: GraphNode, digests: Mapping[str, str]) -> Reservation | None:
        """Reserve room for an attempt at a node, to be passed to `start`; None where the node must wait.

        digests: artifact digests by node id, including the parents'. Raises StageError where the node's cluster is
        gone.
        """
        useful, capacity, room = self._useful_threads(node, digests), self._capacity(node), self._room(node)
        demand = capacity.demand(node, useful)
        if not room.fits(demand):
            if node.launch.kind == "ray":
                self._display.waits(
                    node.id, "room", f" for room: needs {demand}; free of what this run may use: {room}"
                )
            return None
        cores = self._cores if self._backends.room_of(node.launch) is self._backends.here else None
        if cores is not None and (reason := cores.take(demand.cpus)):
            self._display.waits(node.id, "CPUs", f" for CPUs: needs {demand.cpus}; {reason}")
            return None
        share = room.take(demand, capacity.threads(node, useful))
        return Reservation(room, cores, demand, share, capacity.part(node, useful))

    def _capacity(self, node: GraphNode) -> Capacity:
        return self._backends.of(node.launch).capacity()

    def _room(self, node: GraphNode) -> Free:
        backend = self._backends.room_of(node.launch)
        if backend not in self._free:
            self._free[backend] = Free(backend.capacity())
        return self._free[backend]

    def _useful_threads(self, node: GraphNode, digests: Mapping[str, str]) -> int | None:
        """The most threads that a node's op makes use of; computed once, as the node's inputs do not change."""
        if node.id not in self._useful:
            made = {parent: self._store.object_path(digests[parent]) for parent in node.parents}
            self._useful[node.id] = useful_threads(node, made)
        return self._useful[node.id]

    def works_on(self, key: str) -> bool:
        return any(attempt.task.key == key for attempt in self.running.values())

    def start(
        self,
        task: Task,
        reserved: Reservation,
        on_start: Callable[[str, AttemptStart], int],
        on_running: Callable[[], None],
        on_end: Callable[[str, AttemptResult], None],
    ) -> None:
        """Start an attempt at a node. The loop's thread calls the callbacks.

        on_start: with the node's id, when a stage is about to start. on_running: when it has started. on_end: with the
        id, when the attempt has ended and its lease and resources are free again.
        """
        node_id = task.node.id
        for text in self._backends.describe([task.node.launch]):
            if text not in self._told:
                self._told.add(text)
                self._display.note(text)

        def ended(result: AttemptResult) -> None:
            del self.running[node_id]
            reserved.give_back(was_used=True)
            on_end(node_id, result)

        attempt = Attempt(
            task,
            reserved.share,
            reserved.part,
            self._backends,
            self._call,
            partial(on_start, node_id),
            on_running,
            ended,
        )
        self.running[node_id] = attempt
        attempt.start()

    def prepare(self, node: GraphNode, digests: Mapping[str, str]) -> None:
        """Start a worker for the node that will probably start next; it imports libraries while other nodes run.

        digests: those known so far. With op files of the user, which may shadow libraries, it imports none.
        """
        if node.launch.kind != "process" or node.launch.shard_workers > 1:
            return
        named = () if self._graph.op_files else node.op.key_libraries
        libraries = [name for library in named for name in HEAVY.get(library, ())]
        made = {name: self._store.object_path(digest) for name, digest in digests.items()}
        with suppress(ConfigError):  # which the node reports when it starts
            useful, capacity = useful_threads(node, made), self._capacity(node)
            share = Free(capacity).take(capacity.demand(node, useful), capacity.threads(node, useful))
            self._backends.here.prepare(node.id, share, libraries)

    def look_after(self) -> None:
        for attempt in self.running.values():
            attempt.look_after()

    def request_stop(self, why: str) -> None:
        """Request each running stage once to save its progress and end; it is killed after its grace period."""
        for node_id, attempt in self.running.items():
            if attempt.request_stop():
                self._display.note(f"{node_id}: stopping{why}, the stage may save its progress (Ctrl-C: stop at once)")

    def kill(self) -> None:
        for attempt in self.running.values():
            attempt.kill()

    def close(self) -> None:
        """End all stages that still run; there are none unless the loop itself failed."""
        self.kill()
        self._backends.close()
        for attempt in self.running.values():
            attempt.join(ENDED_WITHIN_S)
        self._cores.close()
