"""The attempts that run now, side by side within what the run may use of this machine.

Loaded by name when the first stage starts: a run in which nothing runs needs none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dsl.graph import Graph, GraphNode
from dsl.threads import useful_threads
from executor.launchers.forkserver_client import Children
from executor.launchers.stage_process import stage_environment
from executor.records.run_record import Record
from executor.scheduler.attempt import Attempt, Work
from executor.scheduler.plain_display import Display
from executor.store.artifact_store import Store
from executor.system.resource_pool import Capacity, Free, threads_of
from executor.system.system_metrics import Usage

ENDED_WITHIN_S = 10.0


class Stages:
    """Starts attempts, watches over them and ends them; only the loop's thread calls it."""

    def __init__(
        self,
        store: Store,
        graph: Graph,
        record: Record,
        display: Display,
        tell: Callable[[Callable[[], None]], None],
    ) -> None:
        self.running: dict[str, Attempt] = {}
        self._useful: dict[str, int | None] = {}
        self._store = store
        self._graph = graph
        self._display = display
        self._tell = tell
        self._capacity = Capacity.of_this_machine(graph.machine)
        self._free = Free(self._capacity)
        self._children = Children(stage_environment(1))
        self._usage = Usage(self._watched, lambda node, metrics: record.event(node, "system", metrics=metrics))
        self._usage.start()

    def fits(self, node: GraphNode, digests: Mapping[str, str]) -> bool:
        """digests: those of the node's parents among others."""
        return self._free.fits(self._capacity.demand(node, self._threads(node, digests)))

    def _threads(self, node: GraphNode, digests: Mapping[str, str]) -> int | None:
        """The most that the op makes use of; asked once, since what the node reads stays as it is."""
        if node.id not in self._useful:
            made = {parent: self._store.object_path(digests[parent]) for parent in node.parents}
            self._useful[node.id] = useful_threads(node, made)
        return self._useful[node.id]

    def works_on(self, key: str) -> bool:
        return any(attempt.work.key == key for attempt in self.running.values())

    def start(self, work: Work, done: Callable[[Attempt], None]) -> None:
        """`done` is called by the loop when the attempt has ended, its part of the machine being free again."""
        useful = self._threads(work.node, work.digests)
        demand = self._capacity.demand(work.node, useful)
        share = self._free.take(demand, threads_of(work.node.launch, self._graph.machine, useful))

        def ended(attempt: Attempt) -> None:
            del self.running[work.node.id]
            self._free.give_back(demand, share)
            work.lease.release()
            done(attempt)

        attempt = Attempt(work, share, self._children, self._display, self._tell, ended)
        self.running[work.node.id] = attempt
        attempt.start()

    def _watched(self) -> list[tuple[str, int, Sequence[str] | None]]:
        """Called by the thread that looks at their processes."""
        return [found for attempt in list(self.running.values()) if (found := attempt.watched) is not None]

    def look_after(self) -> None:
        for attempt in self.running.values():
            attempt.look_after()

    def ask_to_stop(self, why: str) -> None:
        """Every stage that runs may save its progress and end; each is asked once, and killed after its grace."""
        for node_id, attempt in self.running.items():
            if attempt.ask_to_stop():
                self._display.note(f"{node_id}: stopping{why}, the stage may save its progress (Ctrl-C: stop at once)")

    def kill(self) -> None:
        for attempt in self.running.values():
            attempt.kill()

    def close(self) -> None:
        """End what still runs, which is nothing unless the loop itself failed."""
        self._usage.close()
        self._children.close()
        for attempt in self.running.values():
            attempt.join(ENDED_WITHIN_S)
            attempt.work.lease.release()
