"""One attempt at a node whose lease is held: prepare the work folder, run the stage, commit its output.

It runs in its own thread, since hashing and waiting take long. It writes no record: the thread of the loop
(run_loop.py) gets an AttemptStart before the stage starts and an AttemptResult at the end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs
from attrs import frozen

from dsl.errors import DflowError, StopRequested
from dsl.graph import GraphNode
from dsl.graph_json import node_to_json
from dsl.imports import search_path
from dsl.secrets import secret_values
from executor.keys.code_archive import keep_texts
from executor.keys.differences import differences, reasons
from executor.keys.node_key import KeyParts, node_inputs
from executor.launchers.failure import TIMEOUT, Failure
from executor.launchers.forkserver_client import Children
from executor.launchers.hosts import wait_for_hosts
from executor.launchers.stage_contract import InputArtifact, StageSpec
from executor.launchers.stage_process import StageExit, StageProcess
from executor.planning.input_snapshot import Snapshot
from executor.planning.planner import Planner
from executor.records.events import Cut, Event, Info, Metric, final_metrics, read_events
from executor.records.run_record import Record
from executor.store.artifact_store import Store
from executor.store.index_line import IndexLine
from executor.store.lease import Lease
from executor.store.manifest import Manifest
from executor.system.crash_points import fail_point
from executor.system.jsonlines import write_json
from executor.system.output import shown_digest
from executor.system.resource_pool import Share

GRACE_S = 30.0
GRACE_NOT_RESUMABLE_S = 3.0
POLL_S = 0.1
T = TypeVar("T")
# The fields of launch that can change results by rounding; the others only decide when and where a stage runs.
LAYOUT = ("kind", "nproc", "nnodes", "sp_degree")


@frozen(kw_only=True)
class Task:
    """What an attempt works on. key: by the key parts of the planner; lease: of the key, held; digests: those of the
    node's parents; adopt: continue work that older code began. The record is only read.
    """

    store: Store
    record: Record
    planner: Planner
    node: GraphNode
    key: str
    lease: Lease
    digests: Mapping[str, str]
    adopt: bool


@frozen(kw_only=True)
class AttemptStart:
    """A stage is about to start. time: seconds since 1970. earlier: metric events of the run that left the work folder
    behind; adopted_from: that run, where its code was another.
    """

    cache: Literal["miss", "resumed"]
    time: float
    earlier: Sequence[Event] = ()
    adopted_from: str | None = None


@frozen(kw_only=True)
class StageMeasures:
    """What a stage used and reported. ended: seconds since 1970; seconds: by a clock that never goes back; memory,
    gpu_memory: peak bytes of its ranks together.
    """

    ended: float
    seconds: float
    metrics: Mapping[str, float]
    memory: int | None
    gpu_memory: int | None


@frozen(kw_only=True)
class AttemptResult:
    """How an attempt ended, and what it computed. stage: None where no stage ran.

    done: digest and acceptance are those of the artifact; difference: how it differs from what the key gave before.
    failed: of failure; log_tail: the last lines of the stage's log.
    replan: nothing was committed, since the store has the key's artifact or code or data changed. parts: the current
    key parts; changes: what changed; kept: path of the work folder.
    """

    status: Literal["done", "stopped", "failed", "replan"]
    stage: StageMeasures | None = None
    digest: str | None = None
    acceptance: str = ""
    difference: str = ""
    warnings: tuple[str, ...] = ()
    failure: Failure | None = None
    log_tail: tuple[str, ...] = ()
    parts: KeyParts | None = None
    changes: tuple[str, ...] = ()
    kept: str = ""


class Attempt(threading.Thread):
    """Holds the lease of its task until it ends."""

    def __init__(
        self,
        task: Task,
        share: Share,
        children: Children,
        call: Callable[[Callable[[], None]], None],
        on_start: Callable[[AttemptStart], int],
        on_end: Callable[[AttemptResult], None],
    ) -> None:
        """call: lets the loop's thread make a call. on_start returns the number of the attempt; on_end is called
        whatever happened.
        """
        super().__init__(daemon=True, name=f"attempt at {task.node.id}")
        self.task = task
        self._share = share
        self._children = children
        self._call = call
        self._on_start = on_start
        self._on_end = on_end
        self._stage: StageProcess | None = None
        self._is_asked = False
        self._is_timed_out = False
        self._stage_began = 0.0
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
            result = AttemptResult(status="failed", failure=Failure.of(error))
        finally:
            mistake = sys.exception()
            if mistake is not None:  # threading shows its traceback
                result = AttemptResult(status="failed", failure=Failure.of_dflow(mistake))
            assert result is not None
            ended = attrs.evolve(result, stage=self._measures)
            self._call(lambda: self._on_end(ended))

    def ask_to_stop(self) -> bool:
        """Let the stage save its progress and end; False if it was asked before."""
        with self._lock:
            first, self._is_asked = not self._is_asked, True
            if self._stage is not None:
                self._stage.ask_to_stop()
        return first

    def kill(self) -> None:
        """At once; the next run completes a commit that is interrupted."""
        self.task.lease.give_up()
        with self._lock:
            if self._stage is not None:
                self._stage.kill()

    def look_after(self) -> None:
        """Called a few times a second: ends a stage that takes too long."""
        stage, launch = self._stage, self.task.node.launch
        if stage is None:
            return
        if launch.timeout and not self._is_asked and time.monotonic() - self._stage_began > launch.timeout:
            self._is_timed_out = True
            self.ask_to_stop()
        grace = GRACE_S if self.task.node.op.resumable else GRACE_NOT_RESUMABLE_S
        if stage.asked_for() > grace:
            stage.kill()

    @property
    def watched(self) -> tuple[str, int, Sequence[str] | None] | None:
        """The node, the process of its stage, and its GPUs, None for all of them; None if no stage runs."""
        stage = self._stage
        pid = stage.pid if stage is not None else None
        return None if pid is None else (self.task.node.id, pid, self._share.gpus)

    def _result(self) -> AttemptResult:
        task, lease = self.task, self.task.lease
        fail_point("run:lease-taken")
        before = Snapshot.of(task.store, task.planner.graph, task.node.id)
        planned = task.planner.parts[task.node.id]
        changed = _changes(task.node.id, planned, before.parts) or _written(before.torn)
        if changed:
            return AttemptResult(status="replan", parts=before.parts, changes=changed)
        lease.wait_for_ranks()
        task.store.finish_commit(lease, task.key)  # of a holder that was interrupted
        if task.planner.hit(task.node.id, task.key) is not None:
            lease.remove()
            return AttemptResult(status="replan")
        wait_for_hosts(lease.folder)
        start, first_byte = self._prepare(before)
        number = self._in_loop(lambda: self._on_start(start))
        fail_point("run:emptied")
        ended = self._run_stage(number)
        self._measures = StageMeasures(
            ended=time.time(),
            seconds=time.monotonic() - self._stage_began,
            metrics=final_metrics(task.record.events_path, task.node.id, first_byte),
            memory=ended.memory,
            gpu_memory=ended.gpu_memory,
        )
        if ended.status != "done":
            return AttemptResult(status=ended.status, failure=ended.failure, log_tail=ended.log_tail)
        return self._finish(start, ended, before)

    def _prepare(self, snapshot: Snapshot) -> tuple[AttemptStart, int]:
        """Make the work folder ready for a stage. Also returns the byte of the events file from which metrics count."""
        task, lease, events = self.task, self.task.lease, self.task.record.events_path
        is_fresh = self._starts_fresh()
        adopted_from = self._adopt_work() if task.adopt and not is_fresh else None
        lease.empty(keep_state=not is_fresh)
        is_resumed = any(lease.work_dir.iterdir())
        write_json(lease.folder / "work.json", {"key_without_code": self._key_without_code(), "node": task.node.id})
        snapshot.write_sources(self._sources)
        keep_texts(task.store.path, task.planner.graph, task.node.id, snapshot.parts.code)
        if not is_resumed:
            first_byte = events.stat().st_size if events.exists() else 0
            return AttemptStart(cache="miss", time=time.time()), first_byte
        earlier = self._earlier_metrics()
        return AttemptStart(cache="resumed", time=time.time(), earlier=earlier, adopted_from=adopted_from), 0

    def _starts_fresh(self) -> bool:
        """Whether the node starts with an empty work folder: it is forced, and neither this run nor the one that it
        continues has started it.
        """
        state, last_run = self.task.record.state, self.task.lease.last_run
        was_started = state.nodes[self.task.node.id].attempt or (last_run and last_run == state.goes_on_from)
        return self.task.node.id in self.task.planner.forced and not was_started

    def _adopt_work(self) -> str | None:
        """Move the newest unleased work folder of the same key without code here; returns the run that left it."""
        lease = self.task.lease
        if lease.work_dir.exists() and any(lease.work_dir.iterdir()):
            return None
        return lease.adopt(self._key_without_code())

    def _earlier_metrics(self) -> list[Event]:
        """The metrics of the run that left the work folder behind: this run's metrics continue them."""
        task, run = self.task, self.task.lease.last_run
        if run is None or run == task.record.run or task.record.state.nodes[task.node.id].attempt:
            return []
        return [
            event
            for event in read_events(task.store.records / run / "events.jsonl")
            if event.node == task.node.id and isinstance(event.body, Metric | Cut)
        ]

    def _in_loop(self, call: Callable[[], T]) -> T:
        """What a call returns or raises in the loop's thread. Raises StopRequested if the attempt is killed first."""
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

    def _run_stage(self, number: int) -> StageExit:
        task = self.task
        self._stage_began = time.monotonic()
        with self._lock:
            if self._is_asked:
                return StageExit("stopped")
            self._stage = stage = StageProcess(
                self._children,
                task.lease,
                self._spec(number),
                task.node.launch,
                self._share,
                task.record.log_path(task.node.id),
                lambda text: task.record.event(task.node.id, Info(text)),
                secret_values(task.node.config),
            )
        fail_point("stage:started")
        ended = stage.wait()
        with self._lock:
            self._stage = None  # no process is left to stop, and its folder may be removed
        fail_point("stage:ended")
        if self._is_timed_out and ended.status != "done":
            seconds = f"{task.node.launch.timeout:g}"
            text = f"TimeoutError: the attempt took longer than launch.timeout = {seconds} s"
            failure = Failure(text, (TIMEOUT, TimeoutError.__name__))
            return attrs.evolve(ended, status="failed", failure=failure, log_tail=stage.tail())
        return ended

    def _spec(self, number: int) -> StageSpec:
        task, lease, launch = self.task, self.task.lease, self.task.node.launch
        return StageSpec(
            node=task.node.id,
            node_json=node_to_json(task.planner.graph, task.node.id),
            search_path=tuple(search_path(task.planner.graph.op_files)),
            sources=self._sources,
            artifacts={
                parent: InputArtifact(task.store.object_path(digest), digest) for parent, digest in task.digests.items()
            },
            folder=lease.folder,
            token=lease.token,
            lease_id=lease.id,
            out_dir=lease.out_dir,
            work_dir=lease.work_dir,
            life_line=lease.path("alive"),
            results=lease.path("results"),
            events=task.record.events_path,
            figures=task.record.folder / "figures" / task.node.id,
            attempt=number,
            device=launch.device,
            sp_degree=launch.sp_degree,
        )

    @property
    def _sources(self) -> Path:
        return self.task.lease.path("code", ".json")

    def _finish(self, start: AttemptStart, ended: StageExit, before: Snapshot) -> AttemptResult:
        """Commit what the stage made, unless it may have read other data than its key names.

        A file that was rewritten with the same content may have had another one in between. That is unlikely, so it
        counts only for an op that cannot resume, which runs again at little cost.
        """
        task, now = self.task, before.since(self.task.store)
        resumable = task.node.op.resumable
        changed = _changes(task.node.id, before.parts, now.parts) or (() if resumable else _written(now.written))
        if changed:
            kept = str(task.lease.set_aside()) if resumable else ""
            if not resumable:
                task.lease.remove()
            return AttemptResult(status="replan", parts=now.parts, changes=changed, kept=kept)
        fail_point("run:commit-begin")
        result = self._commit(start, ended.device)
        fail_point("run:committed")
        written = [f"{file} was written while the stage ran; its content is the same" for file in now.written]
        unseen = [
            f"not part of the key: {file}, which the op finds at run time only; name it in its chosen_code()"
            for file in before.unseen(ended.loaded)
        ]
        return attrs.evolve(result, warnings=(*written, *unseen))

    def _commit(self, start: AttemptStart, device: str) -> AttemptResult:
        """Make the artifact. Raises StageError, StoreError or OSError."""
        task, node, measures = self.task, self.task.node, self._measures
        assert measures is not None
        earlier = task.store.newest(task.key)
        config = _plain({name: getattr(node.config, name) for name in node.op.fields})
        layout = {name: getattr(node.launch, name) for name in LAYOUT}
        launch = {**layout, "threads": self._share.threads, "device": device}
        manifest = Manifest(
            node=node.id,
            op=node.op.name,
            run=task.record.run,
            key=task.key,
            key_parts=task.planner.parts[node.id],
            inputs=node_inputs(node, task.digests.__getitem__),
            config=config,
            launch=launch,
            metrics=measures.metrics,
            started=start.time,
            ended=measures.ended,
        )
        neutral = {name: config[name] for name, spec in node.op.fields.items() if spec.neutral}
        line = IndexLine(
            digest="",
            run=task.record.run,
            time=0.0,
            neutral={**neutral, "launch": launch},
            acceptance="forced" if node.id in task.planner.forced else "computed",
            without_code=self._key_without_code(),
        )
        digest = task.store.commit(task.lease, manifest, line)
        task.lease.remove()
        difference = ""
        if earlier is not None and earlier.digest != digest:
            same = earlier.neutral == line.neutral
            cause = (
                "the op is not deterministic" if same else "settings outside the key (launch, neutral fields) differ"
            )
            difference = (
                f"the same key gave {shown_digest(earlier.digest)} before and {shown_digest(digest)} now: {cause}"
            )
        return AttemptResult(status="done", digest=digest, acceptance=line.acceptance, difference=difference)

    def _key_without_code(self) -> str:
        node = self.task.node
        return self.task.planner.parts[node.id].key_without_code(node_inputs(node, self.task.digests.__getitem__))


def _changes(node_id: str, old: KeyParts, new: KeyParts) -> tuple[str, ...]:
    return tuple(reasons(node_id, differences(old, new)))


def _written(files: Sequence[str]) -> tuple[str, ...]:
    return (f"written meanwhile: {', '.join(files)}",) if files else ()


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """The value as JSON gives it back: tuples are lists."""
    plain: dict[str, Any] = json.loads(json.dumps(value, default=os.fspath))
    return plain
