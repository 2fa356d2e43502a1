"""One attempt at a node whose lease is held: prepare the work folder, run the stage, commit its output (task.py).

It runs in its own thread, since hashing and waiting are slow. It writes no record: the thread of the loop
(run_loop.py) gets an AttemptStart before the stage starts, an AttemptResult at the end, and the lines between.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

import attrs

from dsl.errors import DflowError, StopRequested, StoreError
from dsl.secrets import secret_variables
from executor.keys.differences import differences, reasons
from executor.keys.node_key import KeyParts
from executor.launchers.backends import Backends
from executor.launchers.failure import TIMEOUT, bug_of_dflow, failure, failure_of
from executor.launchers.stage_process import StageExit, StageProcess
from executor.records.events import final_metrics
from executor.scheduler.task import AttemptResult, AttemptStart, Snapshot, StageMeasures, Task
from executor.system.crash_points import fail_point
from executor.system.resource_pool import Demand, Share

GRACE_S = 30.0
GRACE_NOT_RESUMABLE_S = 3.0
POLL_S = 0.1
T = TypeVar("T")


class Attempt(threading.Thread):
    """A thread that makes one attempt at a task; it holds the task's lease until it ends."""

    def __init__(
        self,
        task: Task,
        share: Share,
        part: Demand,
        backends: Backends,
        call: Callable[[Callable[[], None]], None],
        on_start: Callable[[AttemptStart], int],
        on_running: Callable[[], None],
        on_end: Callable[[AttemptResult], None],
    ) -> None:
        """Prepare an attempt at a task. share, part: as in StageOrder.

        call: runs a function in the loop's thread. on_start: returns the attempt's number. on_running: called when its
        stage has started. on_end: called in any case.
        """
        super().__init__(daemon=True, name=f"attempt at {task.node.id}")
        self.task = task
        self._transient = task.node.op.transient
        self._share = share
        self._part = part
        self._backends = backends
        self._call = call
        self._on_start = on_start
        self._on_running = on_running
        self._on_end = on_end
        self._stage: StageProcess | None = None
        self._is_stopping = False
        self._is_timed_out = False
        self._stage_began = 0.0
        self._is_placed = False
        self._measures: StageMeasures | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        result: AttemptResult | None = None
        try:
            with self.task.lease:
                result = self._result()
        except StopRequested:
            result = AttemptResult(status="stopped")
        except (DflowError, OSError) as error:
            result = AttemptResult(status="failed", failure=failure_of(error, self._transient))
        finally:
            mistake = sys.exception()
            if mistake is not None:  # threading shows its traceback
                result = AttemptResult(status="failed", failure=bug_of_dflow(mistake))
            assert result is not None
            ended = attrs.evolve(result, stage=self._measures)
            self._call(lambda: self._on_end(ended))

    def request_stop(self) -> bool:
        """Let the stage save its progress and end; False if that was requested before."""
        with self._lock:
            first, self._is_stopping = not self._is_stopping, True
            if self._stage is not None:
                self._stage.request_stop()
        return first

    def kill(self) -> None:
        """Kill the stage at once; the next run completes a commit that is interrupted."""
        self.task.lease.give_up()
        with self._lock:
            if self._stage is not None:
                self._stage.kill()

    def look_after(self) -> None:
        """End the stage if it takes longer than its timeout. Called a few times a second."""
        stage, launch = self._stage, self.task.node.launch
        if stage is None:
            return
        if not self._is_placed:
            self._is_placed, self._stage_began = stage.is_placed, time.monotonic()
        if launch.timeout and not self._is_stopping and time.monotonic() - self._stage_began > launch.timeout:
            self._is_timed_out = True
            self.request_stop()
        grace = GRACE_S if self.task.node.op.resumable else GRACE_NOT_RESUMABLE_S
        if stage.stopping_for() > grace:
            stage.kill()

    def _result(self) -> AttemptResult:
        task, lease = self.task, self.task.lease
        fail_point("run:lease-taken")
        before = Snapshot.of(task.store, task.planner.graph, task.node.id)
        planned = task.planner.parts[task.node.id]
        changed = _changes(task.node.id, planned, before.parts) or _written(before.torn)
        if changed:
            return AttemptResult(status="replan", parts=before.parts, changes=changed)
        self._recover(lease.folder)
        lease.wait_for_ranks()
        task.store.finish_commit(lease, task.key)  # of a holder that was interrupted
        if task.planner.hit(task.node.id, task.key) is not None:
            lease.remove()
            return AttemptResult(status="replan")
        if damaged := task.damaged_inputs(self._go_on):
            return AttemptResult(status="failed", failure=failure_of(StoreError(damaged), self._transient))
        start, first_byte, sources = task.prepare(before, self._recover)
        task.check_space()
        number = self._in_loop(lambda: self._on_start(start))
        fail_point("run:emptied")
        ended = self._run_stage(number, sources)
        own = time.monotonic() - self._stage_began
        self._measures = measures = StageMeasures(
            ended=time.time(),
            seconds=start.seconds + own,
            attempt_seconds=own,
            metrics=final_metrics(task.record.events_path, task.node.id, first_byte),
            memory=ended.memory,
            gpu_memory=ended.gpu_memory,
            gpu=ended.gpu,
        )
        if ended.status != "done":
            task.keep_seconds(measures.seconds)
            return AttemptResult(status=ended.status, failure=ended.failure, log_tail=ended.log_tail)
        return self._finish(start, ended, measures, before)

    def _go_on(self) -> None:
        """Raise StopRequested if the attempt has to end."""
        self.task.lease.go_on()
        if self._is_stopping:
            raise StopRequested("stopped before its stage started")

    def _recover(self, folder: Path) -> None:
        self._backends.recover(folder, self.task.lease.go_on)

    def _in_loop(self, call: Callable[[], T]) -> T:
        """Run a function in the loop's thread; returns or raises as it does. Raises StopRequested if killed before
        that.
        """
        answer: Future[T] = Future()

        def make_call() -> None:
            try:
                answer.set_result(call())
            except (DflowError, OSError) as error:
                answer.set_exception(error)

        self._call(make_call)
        while not answer.done():
            self.task.lease.go_on()
            wait([answer], POLL_S)
        return answer.result()

    def _run_stage(self, number: int, sources_digest: str) -> StageExit:
        task = self.task
        self._stage_began = time.monotonic()
        with self._lock:
            if self._is_stopping:
                return StageExit("stopped")
            self._stage = stage = StageProcess(
                self._backends.of(task.node.launch),
                task.lease,
                task.stage_spec(number, sources_digest),
                task.node.launch,
                self._share,
                self._part,
                task.record.log_path(task.node.id),
                secret_variables(task.node.config),
                self._transient,
            )
            self._is_placed = stage.is_placed
        self._call(self._on_running)
        fail_point("stage:started")
        ended = stage.wait()
        with self._lock:
            self._stage = None  # no process is left to stop, and its folder may be removed
        fail_point("stage:ended")
        if self._is_timed_out and ended.status != "done":
            seconds = f"{task.node.launch.timeout:g}"
            text = f"TimeoutError: the attempt took longer than launch.timeout = {seconds} s"
            found = failure(text, (TIMEOUT, TimeoutError.__name__), self._transient)
            return attrs.evolve(ended, status="failed", failure=found, log_tail=stage.tail())
        return ended

    def _finish(
        self, start: AttemptStart, ended: StageExit, measures: StageMeasures, before: Snapshot
    ) -> AttemptResult:
        """Commit what the stage made, unless the data or code that its key names has changed meanwhile.

        A file rewritten with the same content may have had other content in between. That is unlikely, so it counts
        only for an op that cannot resume, and so runs again at little cost.
        """
        task = self.task
        parts, rewritten = before.since(task.store)
        resumable = task.node.op.resumable
        changed = _changes(task.node.id, before.parts, parts) or (() if resumable else _written(rewritten))
        if changed:
            kept = str(task.lease.set_aside()) if resumable else ""
            if not resumable:
                task.lease.remove()
            return AttemptResult(status="replan", parts=parts, changes=changed, kept=kept)
        fail_point("run:commit-begin")
        result = task.commit(start.time, measures, ended.device, self._share.threads)
        fail_point("run:committed")
        written = [f"{file} was written while the stage ran; its content is the same" for file in rewritten]
        unseen = [
            f"not part of the key: {file}, which the op finds at run time only; name it in its chosen_code()"
            for file in before.unseen(ended.loaded)
        ]
        return attrs.evolve(result, warnings=(*written, *unseen))


def _changes(node_id: str, old: KeyParts, new: KeyParts) -> tuple[str, ...]:
    return tuple(reasons(node_id, differences(old, new)))


def _written(files: Sequence[str]) -> tuple[str, ...]:
    return (f"written meanwhile: {', '.join(files)}",) if files else ()
