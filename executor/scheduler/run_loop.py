"""The loop over the plan: take cached artifacts, run the other nodes in parallel, and write the record.

One thread decides, writes the record and prints. Attempts at nodes (attempt.py) run in their own threads and reach it
by calls in a queue; only other processes are polled: the leases of other runs, and what stages report.
"""

from __future__ import annotations

import gc
import queue
import signal
import time
import traceback
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from graphlib import TopologicalSorter
from types import FrameType
from typing import TYPE_CHECKING

from attrs import define

from dsl.errors import DflowError, StageError, StoreError
from dsl.files import appended, clear_errors
from dsl.finding import Finding
from executor.keys.node_key import KeyParts
from executor.launchers.failure import failure_of, is_transient, of_node
from executor.planning.history import SourceRuns
from executor.planning.session import Session, plan_row
from executor.records.events import Differs, EventReader, Info, Warned
from executor.records.run_record import NOT_RUN, NodeState, State, Status
from executor.scheduler.plain_display import Display
from executor.store.lease import Lease
from executor.system.crash_points import fail_point
from executor.system.file_locks import shared_gc_lock
from executor.system.output import last_lines, one_line
from executor.tracking.publisher import Publisher
from executor.tracking.sync_state import is_tracked, lacks

if TYPE_CHECKING:
    from executor.scheduler.stage_pool import Reservation, StagePool
    from executor.scheduler.task import AttemptResult, AttemptStart

TICK_S = 0.25
LEASE_POLL_S = 0.1
STATE_AFTER: dict[str, State] = {"done": "done", "stopped": "pending", "replan": "pending"}
MOST_CHANGES = 3
MESSAGE_LENGTH = 2000  # characters of what a stage reports


def run_session(
    session: Session,
    display: Display,
    *,
    adopt: bool = False,
    keep_going: bool = False,
    verify_inputs: bool = False,
) -> int:
    """Run all nodes that are not cached. Returns the exit code.

    0: every node is done; 1: a node failed; 128 + the signal's number: the run was stopped. keep_going: after a
    failure, nodes that do not depend on the failed one still run. verify_inputs: read all input files of a stage before
    it starts, and compare them with their digests.
    """
    gc.enable()  # off so far (executor/cli.py); from here on the process may live for days
    loop = RunLoop(session, display, adopt=adopt, keep_going=keep_going, verify_inputs=verify_inputs)
    with loop.stop.caught(), display:
        status = loop.run()
    if status == "stopped":
        return 128 + loop.stop.number
    return 0 if status == "done" else 1


@define
class Waiting:
    """A node that has yet to run. not_before: by the monotonic clock."""

    place: int
    node_id: str
    not_before: float = 0.0


class RunLoop:
    """The loop of one run: starts the nodes of a session as their inputs become available."""

    def __init__(
        self, session: Session, display: Display, *, adopt: bool, keep_going: bool, verify_inputs: bool
    ) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.stop = StopSignal(lambda: self._calls.put(lambda: None))
        self._store = session.store
        self._record = session.record
        self._planner = session.planner
        self._decisions = dict(session.decisions)
        self._sources = SourceRuns(session.store)
        self._graph = session.graph
        self._resume = f"dflow resume {session.record.run}"
        self._display = display
        self._adopt = adopt
        self._keep_going = keep_going
        self._verify_inputs = verify_inputs
        self._place = {node_id: place for place, node_id in enumerate(session.graph.nodes)}
        self._order = TopologicalSorter({node.id: node.parents for node in session.graph.nodes.values()})
        self._order.prepare()
        self._ready: list[str] = []  # the nodes that are not decided on, whose parents are done; the first one last
        self._add_ready(self._order.get_ready())
        self._digests: dict[str, str] = {}
        self._waiting: list[Waiting] = []
        self._pool: StagePool | None = None
        self._failed: list[str] = []
        self._retries: Counter[str] = Counter()
        self._changes: Counter[str] = Counter()  # attempts that found the node's code or data changed
        self._events = EventReader(self._record.events_path)
        self._looked_at = 0.0
        self._publisher: Publisher | None = None

    def run(self) -> Status:
        status: Status = "failed"
        try:
            self._events.read()
            self._record.save("started")
            status = self._run_nodes()
        finally:
            if self._pool is not None:
                self._pool.close()
            self._finish(status)
        return status

    def _run_nodes(self) -> Status:
        while True:
            self._take_ready()
            self._start_what_fits()
            is_running = self._pool is not None and bool(self._pool.running)
            if not is_running and (self._is_ending or not self._waiting):
                return self._status()
            self._listen()

    @property
    def _is_ending(self) -> bool:
        """Whether no further nodes are started."""
        return self.stop.is_set() or (bool(self._failed) and not self._keep_going)

    def _status(self) -> Status:
        """The final status of the run. Nodes below a failed one get that as their reason."""
        blocked = {below: node_id for node_id in reversed(self._failed) for below in self._graph.below(node_id)}
        pending = [node_id for node_id in self._graph.nodes if self._state(node_id).state == "pending"]
        for node_id in blocked.keys() & set(pending):
            self._state(node_id).reason = f"{NOT_RUN}{blocked[node_id]} failed"
        self._record.save_nodes(node_id for node_id in pending if node_id in blocked)
        was_stopped = self.stop.is_set() and any(node_id not in blocked for node_id in pending)
        if self._failed and not was_stopped:
            return "failed"
        return "stopped" if pending else "done"

    def _finish(self, status: Status) -> None:
        self._record.state.status = status
        self._record.state.ended = time.time()
        self._record.state.results_run = self._record.find_results_run(self._graph)
        self._record.save()
        if self._publisher is None and lacks(self._record):  # the executor died before everything was sent
            self._publisher = Publisher(self._store.path, self._record.folder, self._display)
        if self._publisher is not None:
            before = self.stop.count
            self._publisher.finish(lambda: self.stop.count > before, stopped=status == "stopped")
        self._record.unlock()

    def _state(self, node_id: str) -> NodeState:
        return self._record.state.nodes[node_id]

    # Cached nodes, and nodes that have to run.

    def _take_ready(self) -> None:
        """Take the artifacts of cached nodes; the others wait. The record has the plan's hits as done."""
        fresh = []
        with shared_gc_lock(self._store.path):
            while self._ready and not self._is_ending:
                node_id = self._ready.pop()
                if node_id in self._failed:  # it was refused before its turn
                    continue
                if self._decisions[node_id].cache != "hit":
                    self._decisions[node_id] = self._planner.decide(node_id, self._digests)
                    fresh.append(node_id)
                if self._decisions[node_id].cache == "hit":
                    self._take(node_id)
                    if fresh and node_id == fresh[-1]:
                        self._refuse_below(node_id)
                else:
                    self._wait(node_id)
            self._record.save_nodes(node_id for node_id in fresh if self._state(node_id).state == "done")

    def _take(self, node_id: str) -> None:
        """Mark a node as done whose artifact is in the store, with the metrics of the run that made it."""
        decision = self._decisions[node_id]
        assert decision.digest is not None
        if self._state(node_id).state != "done":
            self._sources.set_hit(self._record, node_id, decision)
        self._add_done(node_id, decision.digest)
        self._display.changed(node_id)

    def _add_done(self, node_id: str, digest: str) -> None:
        """Note that a node's artifact is in the store, so that nodes below may become ready."""
        self._digests[node_id] = digest
        self._order.done(node_id)
        self._add_ready(self._order.get_ready())

    def _refuse_below(self, node_id: str) -> None:
        """Fail the nodes that do not fit this artifact, which is new: hours before their turn, and all of them."""
        from executor.planning.preflight import conflicts_below  # of no use where all is cached

        below = self._graph.below(node_id)
        pending = [each for each in self._graph.nodes if each in below and self._state(each).state == "pending"]
        try:
            found = conflicts_below(self._store, self._graph, pending, self._digests)
        except DflowError as error:
            self._display.warn(f"{node_id}: what its artifact means for later nodes is not known: {error}")
            return
        for each, mistake in found.items():
            self._fail(each, failure_of(mistake), self._logged_bug(each, mistake))

    def _logged_bug(self, node_id: str, mistake: Exception) -> tuple[str, ...]:
        """Write the traceback of a bug in a node's op to its log; returns its last lines, none for other errors."""
        if isinstance(mistake, DflowError):
            return ()
        path = self._record.log_path(node_id)
        with clear_errors(path), appended(path) as log:
            start = log.tell()
            log.write("".join(traceback.format_exception(mistake)).encode(errors="backslashreplace"))
        return last_lines(path, start)

    def _add_ready(self, node_ids: Iterable[str]) -> None:
        for node_id in node_ids:
            insort(self._ready, node_id, key=lambda other: -self._place[other])

    def _wait(self, node_id: str, seconds: float = 0.0) -> None:
        not_before = time.monotonic() + seconds if seconds else 0.0
        insort(self._waiting, Waiting(self._place[node_id], node_id, not_before), key=lambda other: other.place)

    # Attempts.

    def _start_what_fits(self) -> None:
        """Start the nodes for which there is room, in the order of the graph."""
        now = time.monotonic()
        for waiting in list(self._waiting):
            if self._is_ending:
                return
            if waiting.not_before <= now and self._start(waiting):
                self._waiting.remove(waiting)

    def _start(self, waiting: Waiting) -> bool:
        """Start an attempt at the node; False if it still waits for room or for the lease of its key."""
        from executor.scheduler.stage_pool import StagePool
        from executor.scheduler.task import Task

        node_id = waiting.node_id
        node, decision = self._graph.nodes[node_id], self._decisions[node_id]
        assert decision.key is not None
        if self._pool is None:
            self._pool = StagePool(self._store, self._graph, self._record, self._display, self._calls.put)
        if self._pool.works_on(decision.key):
            return False
        reserved: Reservation | None = None
        try:
            reserved = self._pool.reserve(node, self._digests)
            if reserved is None:
                return False
            lease = self._store.lease(decision.key, self._record.run)
            if not lease.try_acquire():
                reserved.give_back(was_used=False)
                self._wait_for_lease(waiting, lease)
                return False
        except DflowError as error:
            if reserved is not None:
                reserved.give_back(was_used=False)
            self._fail(node_id, failure_of(error), ())
            return True
        task = Task(
            store=self._store,
            record=self._record,
            planner=self._planner,
            node=node,
            key=decision.key,
            lease=lease,
            digests={parent: self._digests[parent] for parent in node.parents},
            made={done: self._store.object_path(digest) for done, digest in self._digests.items()},
            adopt=self._adopt,
            verify_inputs=self._verify_inputs,
            run=self._record.run,
            attempt=self._state(node_id).attempt,
            goes_on_from=self._record.state.goes_on_from,
        )
        self._pool.start(task, reserved, self._on_start, self._on_running, self._on_end)
        return True

    def _wait_for_lease(self, waiting: Waiting, lease: Lease) -> None:
        waiting.not_before = time.monotonic() + LEASE_POLL_S
        if holder := lease.holder_text():
            self._display.waits(waiting.node_id, "lease", f", {holder}")

    def _on_start(self, node_id: str, start: AttemptStart) -> int:
        """Record that a stage starts; returns the number of the attempt."""
        if self._publisher is None and is_tracked(self._record):
            self._publisher = Publisher(self._store.path, self._record.folder, self._display)
        if start.continued_from is not None:
            text = f"continues the work of run {start.continued_from}, though the code has changed since"
            self._display.note(f"{node_id}: {text}")
        state, decision = self._state(node_id), self._decisions[node_id]
        state.key = decision.key
        if not self._retries[node_id]:
            state.reason = decision.reason
        state.state, state.cache = "running", start.cache
        state.attempt = (start.earlier[-1].attempt if start.earlier else state.attempt) + 1
        state.started, state.ended, state.failure, state.warnings = start.time, None, None, []
        state.attempt_seconds = None
        self._record.write_events(start.earlier)
        self._record.save_node(node_id)
        self._display.changed(node_id)
        return state.attempt

    def _on_running(self) -> None:
        """Prepare a worker for the next node in the order of the graph."""
        assert self._pool is not None
        running = self._pool.running
        following = (id for id in self._graph.nodes if self._state(id).state == "pending" and id not in running)
        if not self._is_ending and (node_id := next(following, None)) is not None:
            self._pool.prepare(self._graph.nodes[node_id], self._digests)

    def _on_end(self, node_id: str, result: AttemptResult) -> None:
        """Record how an attempt ended."""
        state, stage = self._state(node_id), result.stage
        if stage is not None:
            state.ended, state.seconds, state.metrics = stage.ended, stage.seconds, dict(stage.metrics)
            state.attempt_seconds = None if stage.attempt_seconds == stage.seconds else stage.attempt_seconds
            state.memory, state.gpu_memory, state.gpu = stage.memory, stage.gpu_memory, stage.gpu
        for text in result.warnings:
            self._record.event(node_id, Warned(text))
        self._show_events()
        if result.failure is not None:
            if self._is_ending or not self._retry(node_id, result.failure):
                self._fail(node_id, result.failure, result.log_tail)
            return
        if result.status == "replan" and not self._is_ending:
            self._replan(node_id, result)
            return
        state.state, state.failure = STATE_AFTER[result.status], None
        if result.status == "done":
            state.digest, state.acceptance = result.digest, result.acceptance
        self._record.save_node(node_id)
        if result.difference:
            message = f"{node_id}: {result.difference}"
            self._record.event(node_id, Differs(message))
            self._display.warn(message)
        if result.digest is not None:
            fail_point("run:recorded")
            self._add_done(node_id, result.digest)
            self._refuse_below(node_id)
        self._display.changed(node_id)

    def _replan(self, node_id: str, result: AttemptResult) -> None:
        """Decide again about a node: another run committed its artifact, or its code or data changed.

        The output of a stage whose data changed while it ran is not used.
        """
        state = self._state(node_id)
        if result.changes:
            self._changes[node_id] += 1
            changed = f"its code or data changed while it ran ({'; '.join(result.changes)})"
            if self._changes[node_id] >= MOST_CHANGES:
                where = f"; what it made is kept in {result.kept}" if result.kept else ""
                text = f"{changed}, {MOST_CHANGES} times in a row; stop editing them, and resume{where}"
                self._fail(node_id, failure_of(StageError(text)), ())
                return
            if result.stage is None:
                self._display.note(f"{node_id}: its code or data changed since planning; the current version is used")
            else:
                made = f"what it made is kept in {result.kept}, and " if result.kept else ""
                self._display.note(f"{node_id}: {changed}; {made}it runs again with the current version")
            state.state = "pending"
            self._record.save_node(node_id, "outdated", changes=result.changes)
        if result.parts is not None:
            self._use_parts(node_id, result.parts)
        self._add_ready([node_id])

    def _use_parts(self, node_id: str, parts: KeyParts) -> None:
        """Replace a node's key parts by those that an attempt found, and plan the node again."""
        self._planner = self._planner.with_parts(node_id, parts)
        decision = self._planner.decide(node_id, self._digests)
        self._record.save_plan({**self._record.plan(), node_id: plan_row(self._planner, node_id, decision)})

    def _retry(self, node_id: str, failure: Finding) -> bool:
        """Let a node wait and then run again in its work folder after a transient error; False if it may not."""
        launch = self._graph.nodes[node_id].launch
        if self._retries[node_id] >= launch.retries or not is_transient(failure):
            return False
        wait = launch.retry_wait * 2 ** self._retries[node_id]
        self._retries[node_id] += 1
        state = self._state(node_id)
        state.state, state.failure = "pending", failure
        self._record.save_node(node_id, "retry", wait=wait)
        again = f"retry {self._retries[node_id]} of {launch.retries} in {wait:g} s"
        self._display.note(f"{node_id}: {failure.what}; {again}")
        self._wait(node_id, wait)
        return True

    def _fail(self, node_id: str, failure: Finding, log_tail: tuple[str, ...]) -> None:
        """Write the failure into the record, and show it with the end of its log."""
        state, resumable = self._state(node_id), self._graph.nodes[node_id].op.resumable
        found = of_node(failure, node_id, retries=self._retries[node_id], resume=self._resume, resumable=resumable)
        state.state, state.failure = "failed", found
        self._failed.append(node_id)
        self._record.save_node(node_id)
        self._display.changed(node_id)
        self._display.failure(found, log_tail, self._record.log_path(node_id))

    # While stages run.

    def _listen(self) -> None:
        """Wait until something happens, and check the running stages a few times a second."""
        with suppress(queue.Empty):
            self._calls.get(timeout=self._patience())()
        while not self._calls.empty():
            self._calls.get()()
        if self._pool is None or (time.monotonic() - self._looked_at < TICK_S and not self._is_ending):
            return
        self._looked_at = time.monotonic()
        self._show_events()
        self._pool.look_after()
        if self._is_ending:
            self._pool.request_stop("" if self.stop.is_set() else f", since {self._failed[0]} failed")
        if self.stop.count > 1:
            self._pool.kill()

    def _patience(self) -> float:
        """The seconds to wait for the next event."""
        soonest = min((waiting.not_before for waiting in self._waiting if waiting.not_before), default=None)
        until_then = TICK_S if soonest is None else max(0.01, soonest - time.monotonic())
        return min(TICK_S, until_then)

    def _show_events(self) -> None:
        """Show what the stages reported since the last call, and keep their warnings.

        Raises StoreError where the record is gone.
        """
        if not self._record.events_path.exists():
            raise StoreError(f"{self._record.folder}: the record of this run was removed while it ran")
        events = self._events.read()
        self._display.show(events)
        for event in events:
            node_id, body = event.node, event.body
            if not isinstance(body, Info | Warned) or node_id not in self._record.state.nodes:
                continue
            text = one_line(body.message, MESSAGE_LENGTH)
            if isinstance(body, Info):
                self._display.note(f"{node_id}: {text}")
                continue
            self._display.warn_of(node_id, text)
            warnings = self._state(node_id).warnings
            if text not in warnings:
                warnings.append(text)


class StopSignal:
    """The stop signals received: the count of Ctrl-C, SIGTERM and closed terminals, and the last one's number.

    wake: called for each, to end a wait.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.number = 0
        self.count = 0
        self._wake = wake

    def is_set(self) -> bool:
        return self.count > 0

    @contextmanager
    def caught(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where a shell ignores it, nobody would see how a stage ended
        before = [signal.signal(number, self._note) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self.count += 1
        self._wake()
