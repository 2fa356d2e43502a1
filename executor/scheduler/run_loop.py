"""The loop over the plan: take what the store holds, let the rest run side by side, and keep the record.

One thread decides, and speaks to the user. Attempts at nodes (attempt.py) run in threads of their own and tell it by
calls in a queue, so that nothing is polled but what other processes do: the lease of another run, and what stages print
and report.
"""

from __future__ import annotations

import queue
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from attrs import define

from dsl.errors import DflowError, StageError
from executor.launchers.failure import Failure
from executor.planning.cache_hits import SourceRuns, made_meanwhile
from executor.planning.planner import Decision
from executor.planning.session import Session, plan_row, refreshed
from executor.records.events import EventReader
from executor.records.results_run import results_run
from executor.records.run_record import NOT_RUN, NodeState, State, Status
from executor.scheduler.plain_display import Display
from executor.scheduler.ready_queue import Schedule
from executor.scheduler.stop_signal import StopSignal
from executor.store.gc_lock import artifacts_taken
from executor.store.lease import Lease
from executor.system.crash_points import fail_point
from executor.system.output import one_line
from executor.tracking.publisher import Follower
from executor.tracking.sync_state import is_tracked, lacks

if TYPE_CHECKING:
    from executor.scheduler.attempt import Attempt
    from executor.scheduler.stage_pool import Stages

TICK_S = 0.25
LEASE_POLL_S = 0.1
TRANSIENT = "dsl.errors.TransientError"
STATE_AFTER: dict[str, State] = {"done": "done", "stopped": "pending", "failed": "failed", "outdated": "pending"}
MOST_OUTDATED = 3
MESSAGE_LENGTH = 2000  # characters of what a stage reports


def run_session(session: Session, display: Display, *, adopt: bool = False, keep_going: bool = False) -> int:
    """Run what is stale. Returns the exit code: 0 only when every node is done.

    keep_going: where a node failed, what does not read from it runs all the same. 1 where a node failed; 128 + the
    signal's number where the run was asked to stop.
    """
    runner = Runner(session, display, adopt=adopt, keep_going=keep_going)
    with runner.stop.caught(), display:
        status = runner.run()
    if status == "stopped":
        return 128 + runner.stop.number
    return 0 if status == "done" else 1


@define
class Waiting:
    """A node that is to run: not before a time by the monotonic clock.

    decision: as it was when the lease was asked for; is_held: another run had the lease then.
    """

    place: int
    node_id: str
    not_before: float = 0.0
    decision: Decision | None = None
    is_held: bool = False


class Runner:
    """One pass over the nodes of a session."""

    def __init__(self, session: Session, display: Display, *, adopt: bool, keep_going: bool) -> None:
        self._told: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.stop = StopSignal(lambda: self._told.put(lambda: None))
        self._store = session.store
        self._record = session.record
        self._planner = session.planner
        self._decisions = session.decisions
        self._sources = SourceRuns(session.store)
        self._graph = session.graph
        self._display = display
        self._adopt = adopt
        self._keep_going = keep_going
        self._schedule = Schedule(session.graph)
        self._digests: dict[str, str] = {}
        self._waiting: list[Waiting] = []
        self._stages: Stages | None = None
        self._failed: list[str] = []
        self._retries: Counter[str] = Counter()
        self._outdated: Counter[str] = Counter()  # attempts at a node while which its code or data changed
        self._events = EventReader(self._record.events_path)
        self._looked_at = 0.0
        self._follower: Follower | None = None

    def run(self) -> Status:
        status: Status = "failed"
        try:
            self._events.read()
            self._record.event("", "run", state="started")
            status = self._nodes()
        finally:
            if self._stages is not None:
                self._stages.close()
            self._finish(status)
        return status

    def _nodes(self) -> Status:
        while True:
            self._take_ready()
            if self._start_what_fits():
                continue  # one of them was there already, so that others may start
            if not self._is_running and (self._is_ending or not self._waiting):
                return self._status()
            self._listen()

    @property
    def _is_running(self) -> bool:
        return self._stages is not None and bool(self._stages.running)

    @property
    def _is_ending(self) -> bool:
        """Whether no further node is to start."""
        return self.stop.is_set() or (bool(self._failed) and not self._keep_going)

    def _status(self) -> Status:
        """Nodes below a failed one are said not to run."""
        blocked = {below: node_id for node_id in reversed(self._failed) for below in self._graph.below(node_id)}
        left = [node_id for node_id in self._graph.nodes if self._state(node_id).state == "pending"]
        for node_id in blocked.keys() & left:
            self._state(node_id).reason = f"{NOT_RUN}{blocked[node_id]} failed"
        self._record.save_nodes(node_id for node_id in left if node_id in blocked)
        was_stopped = self.stop.is_set() and any(node_id not in blocked for node_id in left)
        if self._failed and not was_stopped:
            return "failed"
        return "stopped" if left else "done"

    def _finish(self, status: Status) -> None:
        self._record.state.status = status
        self._record.state.ended = time.time()
        self._record.state.results_run = results_run(self._record, self._graph)
        self._record.event("", "run", state=status)
        self._record.save()
        if self._follower is None and lacks(self._record):  # the executor died before it had sent all
            self._follower = Follower(self._store.path, self._record.folder, self._display)
        if self._follower is not None:
            asked = self.stop.count
            self._follower.finish(lambda: self.stop.count > asked, stopped=status == "stopped")
        self._record.unlock()

    def _state(self, node_id: str) -> NodeState:
        return self._record.state.nodes[node_id]

    def _take_ready(self) -> None:
        """Take the artifacts of nodes that are cached; the others wait. What the plan took is done in the record."""
        taken, fresh = [], []
        with artifacts_taken(self._store.path):
            while not self._is_ending and (node_id := self._schedule.next()) is not None:
                decision = self._decisions[node_id]
                if decision.cache != "hit":
                    decision = self._planner.decide(node_id, self._digests)
                    fresh.append(node_id)
                if decision.cache == "hit":
                    self._take(node_id, decision)
                    taken.append(node_id)
                else:
                    self._wait(Waiting(self._schedule.place(node_id), node_id))
            self._record.save_nodes(node_id for node_id in fresh if self._state(node_id).state == "done")
        self._record.events(self._cached_event(node_id) for node_id in taken)

    def _wait(self, waiting: Waiting) -> None:
        insort(self._waiting, waiting, key=lambda other: other.place)

    def _take(self, node_id: str, decision: Decision) -> None:
        """The artifact is there: the node is done, with the metrics of the run that made it."""
        assert decision.digest is not None
        self._digests[node_id] = decision.digest
        if self._state(node_id).state != "done":
            self._sources.take(self._record, node_id, decision)
        self._schedule.done(node_id)
        self._display.changed(node_id)

    def _start_what_fits(self) -> bool:
        """Start what there is room for, the first in the graph first; True where an artifact was taken meanwhile."""
        is_any_taken = False
        now = time.monotonic()
        for waiting in list(self._waiting):
            if self._is_ending:
                break
            if waiting.not_before > now:
                continue
            done_before = len(self._digests)
            if self._begin(waiting):
                self._waiting.remove(waiting)
            is_any_taken |= len(self._digests) > done_before
        return is_any_taken

    def _running_stages(self) -> Stages:
        if self._stages is None:
            from executor.scheduler.stage_pool import Stages

            self._stages = Stages(self._store, self._graph, self._record, self._display, self._told.put)
        return self._stages

    def _begin(self, waiting: Waiting) -> bool:
        """Start the node, or take what another run made of it; False where it still waits."""
        node_id, lease = waiting.node_id, None
        try:
            if not self._running_stages().fits(self._graph.nodes[node_id], self._digests):
                return False
            if waiting.decision is None:
                waiting.decision = self._refreshed(node_id)
            key = waiting.decision.key
            assert key is not None
            if self._running_stages().works_on(key):
                return False
            lease = self._store.lease(key, self._record.run)
            if not lease.try_acquire():
                self._wait_for_lease(waiting, lease)
                return False
            if waiting.is_held and (newest := self._refreshed(node_id)).key != key:
                waiting.decision = newest
                lease.release()
                return False
            return self._go_on_with(waiting, key, lease)
        except DflowError as error:
            if lease is not None:
                lease.release()
            self._fail(node_id, Failure.of(error), ())
            return True

    def _wait_for_lease(self, waiting: Waiting, lease: Lease) -> None:
        waiting.not_before = time.monotonic() + LEASE_POLL_S
        holder = lease.held_by()
        if not waiting.is_held and holder:
            self._display.note(f"{waiting.node_id}: waiting, {holder}")
            waiting.is_held = True

    def _go_on_with(self, waiting: Waiting, key: str, lease: Lease) -> bool:
        """With the lease: take what was made meanwhile, else start an attempt."""
        node_id = waiting.node_id
        with artifacts_taken(self._store.path):
            is_forced = node_id in self._planner.forced
            made = made_meanwhile(self._store, key, self._record.run, forced=is_forced)
            if made is not None:
                lease.remove()
                self._take(node_id, made)
                self._record.save_node(node_id)
                self._record.events([self._cached_event(node_id)])
                return True
        self._start(node_id, waiting, key, lease)
        return True

    def _start(self, node_id: str, waiting: Waiting, key: str, lease: Lease) -> None:
        from executor.scheduler.attempt import Work

        state, node = self._state(node_id), self._graph.nodes[node_id]
        assert waiting.decision is not None
        state.key = key
        if not self._retries[node_id]:
            state.reason = waiting.decision.reason
        if self._follower is None and is_tracked(self._record):
            self._follower = Follower(self._store.path, self._record.folder, self._display)
        work = Work(
            store=self._store,
            record=self._record,
            graph=self._graph,
            node=node,
            parts=self._planner.parts[node_id],
            key=key,
            lease=lease,
            digests={parent: self._digests[parent] for parent in node.parents},
            forced=node_id in self._planner.forced,
            adopt=self._adopt,
        )
        self._running_stages().start(work, self._ended)

    def _refreshed(self, node_id: str) -> Decision:
        """The decision for a node that will run, by its code and data as its stage will find them."""
        planner = refreshed(self._store, self._planner, node_id)
        decision = planner.decide(node_id, self._digests)
        if planner.parts[node_id] != self._planner.parts[node_id]:
            self._planner = planner
            self._record.save_plan({**self._record.plan(), node_id: plan_row(planner, node_id, decision)})
            self._display.note(f"{node_id}: its code or data changed since the run began; the newest is taken")
        return decision

    def _listen(self) -> None:
        """Wait until something happens, and see to the stages that run a few times a second."""
        with suppress(queue.Empty):
            self._told.get(timeout=self._patience())()
        while not self._told.empty():
            self._told.get()()
        if self._stages is None or (time.monotonic() - self._looked_at < TICK_S and not self._is_ending):
            return
        self._looked_at = time.monotonic()
        self._show_events()
        self._stages.look_after()
        if self._is_ending:
            self._stages.ask_to_stop("" if self.stop.is_set() else f", since {self._failed[0]} failed")
        if self.stop.count > 1:
            self._stages.kill()

    def _show_events(self) -> None:
        """Show what the stages reported since the last call, and keep their warnings."""
        events = self._events.read()
        self._display.show(events)
        for event in events:
            if event["kind"] not in ("info", "warning") or event["node"] not in self._record.state.nodes:
                continue
            node_id, text = event["node"], one_line(str(event["message"]), MESSAGE_LENGTH)
            if event["kind"] == "info":
                self._display.note(f"{node_id}: {text}")
                continue
            self._display.warn_of(node_id, text)
            warnings = self._state(node_id).warnings
            if text not in warnings:
                warnings.append(text)

    def _patience(self) -> float:
        """Seconds."""
        soonest = min((waiting.not_before for waiting in self._waiting if waiting.not_before), default=None)
        until_then = TICK_S if soonest is None else max(0.01, soonest - time.monotonic())
        return min(TICK_S, until_then)

    def _ended(self, attempt: Attempt) -> None:
        """Put down how an attempt ended."""
        self._show_events()
        node_id, result = attempt.work.node.id, attempt.result
        assert result is not None
        if result.failure is not None:
            if not self._is_ending and self._tries_again(node_id, result.failure):
                return
            self._fail(node_id, result.failure, result.log_tail)
            return
        if result.status == "outdated" and not self._is_ending:
            self._run_newest(node_id, result.changes, result.kept)
            return
        state = self._state(node_id)
        state.state, state.error = STATE_AFTER[result.status], None
        self._record.save_node(node_id)
        if result.status == "done":
            fail_point("run:recorded")
            assert state.digest is not None
            self._digests[node_id] = state.digest
            self._schedule.done(node_id)
        self._record.event(node_id, "state", state=state.state, digest=state.digest, seconds=state.seconds)
        self._display.changed(node_id)

    def _run_newest(self, node_id: str, changes: tuple[str, ...], kept: str) -> None:
        """After data changed while the node ran: what it made is of neither state, so it runs anew."""
        self._outdated[node_id] += 1
        changed = f"its code or data changed while it ran ({'; '.join(changes)})"
        if self._outdated[node_id] >= MOST_OUTDATED:
            where = f"; what it made is kept in {kept}" if kept else ""
            text = f"{changed}, {MOST_OUTDATED} times in a row; leave them as they are, and resume{where}"
            error = StageError(text)
            self._fail(node_id, Failure.of(error), ())
            return
        state = self._state(node_id)
        state.state = "pending"
        self._record.save_node(node_id)
        self._record.event(node_id, "state", state="outdated", changes=list(changes))
        made = f"what it made is kept in {kept}, and " if kept else ""
        self._display.note(f"{node_id}: {changed}; {made}it runs again with the newest")
        self._wait(Waiting(self._schedule.place(node_id), node_id))

    def _tries_again(self, node_id: str, failure: Failure) -> bool:
        """After an error that may pass, the node waits its time and then takes its work folder up again."""
        launch, op = self._graph.nodes[node_id].launch, self._graph.nodes[node_id].op
        if self._retries[node_id] >= launch.retries or not failure.is_any_of((TRANSIENT, *op.transient)):
            return False
        wait = launch.retry_wait * 2 ** self._retries[node_id]
        self._retries[node_id] += 1
        state = self._state(node_id)
        state.state, state.error = "pending", failure.text
        self._record.save_node(node_id)
        self._record.event(node_id, "state", state="retry", error=failure.text, wait=wait)
        again = f"retry {self._retries[node_id]} of {launch.retries} in {wait:g} s"
        self._display.note(f"{node_id}: {failure.text}; {again}")
        self._wait(Waiting(self._schedule.place(node_id), node_id, not_before=time.monotonic() + wait))
        return True

    def _fail(self, node_id: str, failure: Failure, log_tail: tuple[str, ...]) -> None:
        """Put the failure down, and show it with the end of its log."""
        tries = self._retries[node_id]
        text = f"{failure.text} (after {tries} {'retry' if tries == 1 else 'retries'})" if tries else failure.text
        state = self._state(node_id)
        state.state, state.error = "failed", text
        self._failed.append(node_id)
        hint = failure.hint(self._record.run, resumable=self._graph.nodes[node_id].op.resumable)
        self._record.save_node(node_id)
        self._record.event(node_id, "state", state="failed", error=text, hint=hint, seconds=state.seconds)
        self._display.changed(node_id)
        self._display.failure(node_id, text, log_tail, self._record.log_path(node_id), hint)

    def _cached_event(self, node_id: str) -> dict[str, object]:
        return {"node": node_id, "kind": "state", "state": "done", "cache": "hit", "digest": self._digests[node_id]}
