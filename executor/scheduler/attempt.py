"""One attempt at a node whose lease is held: prepare the work folder, run the stage, commit what it made.

It runs in a thread of its own, since hashing and waiting take long. What the user sees is told through `tell`: calls
that the loop of run_loop.py makes in its own thread.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs import frozen

from dsl.errors import DflowError, StopRequested
from dsl.graph import Graph, GraphNode
from dsl.graph_json import node_to_json
from dsl.search_path import search_path
from dsl.secrets import secret_values
from executor.keys.code_archive import keep_texts
from executor.keys.differences import differences, reasons
from executor.keys.node_key import KeyParts, node_inputs
from executor.launchers.failure import TIMEOUT, Failure
from executor.launchers.forkserver_client import Children
from executor.launchers.hosts import wait_for_hosts
from executor.launchers.stage_contract import StageSpec
from executor.launchers.stage_process import StageExit, StageProcess
from executor.planning.cache_hits import SourceRuns, made_meanwhile
from executor.planning.input_snapshot import Snapshot
from executor.records.events import final_metrics, read_events
from executor.records.run_record import NodeState, Record
from executor.scheduler.plain_display import Display
from executor.store.artifact_store import Store
from executor.store.gc_lock import artifacts_taken
from executor.store.lease import Lease
from executor.system.crash_points import fail_point
from executor.system.jsonlines import append_lines, write_json
from executor.system.resource_pool import Share

GRACE_S = 30.0
GRACE_NOT_RESUMABLE_S = 3.0
# What of the launch can change results by rounding; the rest says only when and where a stage may run.
LAYOUT = ("kind", "nproc", "nnodes", "sp_degree")


@frozen(kw_only=True)
class Work:
    """What an attempt works with. digests are those of the node's parents, forced: whatever the store holds."""

    store: Store
    record: Record
    graph: Graph
    node: GraphNode
    parts: KeyParts
    key: str
    lease: Lease
    digests: Mapping[str, str]
    forced: bool
    adopt: bool


@frozen(kw_only=True)
class AttemptResult:
    """How an attempt ended. log_tail: the last lines of the stage's log.

    outdated: data changed while it ran, or code before, so that what it made is of no key; changes say what, kept where
    it is.
    """

    status: Literal["done", "stopped", "failed", "outdated"]
    failure: Failure | None = None
    log_tail: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    kept: str = ""


class Attempt(threading.Thread):
    """Ends with an outcome; `done` is called with the attempt through `tell`, whatever happened."""

    def __init__(
        self,
        work: Work,
        share: Share,
        children: Children,
        display: Display,
        tell: Callable[[Callable[[], None]], None],
        done: Callable[[Attempt], None],
    ) -> None:
        super().__init__(daemon=True, name=f"attempt at {work.node.id}")
        self.work = work
        self.result: AttemptResult | None = None
        self.is_timed_out = False
        self._share = share
        self._children = children
        self._display = display
        self._tell = tell
        self._done = done
        self._stage: StageProcess | None = None
        self._is_asked = False
        self._stage_began = 0.0
        self._lock = threading.Lock()

    def run(self) -> None:
        try:
            self.result = self._result()
        except StopRequested:
            self.result = AttemptResult(status="stopped")
        except (DflowError, OSError) as error:
            self.result = AttemptResult(status="failed", failure=Failure.of(error))
        finally:
            mistake = sys.exception()
            if mistake is not None and self.result is None:  # threading shows its traceback
                self.result = AttemptResult(status="failed", failure=Failure.of_dflow(mistake))
            self._tell(lambda: self._done(self))

    def ask_to_stop(self) -> bool:
        """Let the stage save its progress and end; False where it was asked before."""
        with self._lock:
            first, self._is_asked = not self._is_asked, True
            if self._stage is not None:
                self._stage.ask_to_stop()
        return first

    def kill(self) -> None:
        """At once: a commit that goes on is left to the next run."""
        self.work.lease.give_up()
        with self._lock:
            if self._stage is not None:
                self._stage.kill()

    def look_after(self) -> None:
        """Called a few times a second: end a stage that takes too long."""
        stage, launch = self._stage, self.work.node.launch
        if stage is None:
            return
        if launch.timeout and not self._is_asked and time.monotonic() - self._stage_began > launch.timeout:
            self.is_timed_out = True
            self.ask_to_stop()
        grace = GRACE_S if self.work.node.op.resumable else GRACE_NOT_RESUMABLE_S
        if stage.asked_for() > grace:
            stage.kill()

    @property
    def watched(self) -> tuple[str, int, Sequence[str] | None] | None:
        """The node, the process of its stage, and its GPUs, None for all of them; None where no stage runs."""
        stage = self._stage
        pid = stage.pid if stage is not None else None
        return None if pid is None else (self.work.node.id, pid, self._share.gpus)

    @property
    def _state(self) -> NodeState:
        return self.work.record.state.nodes[self.work.node.id]

    def _result(self) -> AttemptResult:
        work, state = self.work, self._state
        fail_point("run:lease-taken")
        before = Snapshot.of(work.store, work.graph, work.node.id)
        changed = reasons(work.node.id, differences(work.parts, before.parts)) or _written(before.torn)
        if changed:
            return AttemptResult(status="outdated", changes=tuple(changed))
        work.lease.wait_for_ranks()
        if self._is_finished():
            return AttemptResult(status="done")
        wait_for_hosts(work.lease.folder)
        is_anew = self._is_anew()
        if work.adopt and not is_anew:
            self._adopt_work()
        work.lease.empty(keep_state=not is_anew)
        resumed = any(work.lease.work_dir.iterdir())
        began = work.record.events_path.stat().st_size if work.record.events_path.exists() else 0
        if resumed:
            began = 0
            self._inherit_events()
        write_json(work.lease.folder / "work.json", {"key_without_code": self._without_code(), "node": work.node.id})
        before.write_sources(self._sources)
        keep_texts(work.store.path, work.graph, work.node.id, work.parts.code)
        state.state, state.cache, state.attempt = "running", "resumed" if resumed else "miss", state.attempt + 1
        state.started, state.ended, state.error, state.warnings = time.time(), None, None, []
        work.record.save_node(work.node.id)
        work.record.event(work.node.id, "state", state="running", cache=state.cache, key=work.key)
        self._tell(lambda: self._display.changed(work.node.id))
        fail_point("run:emptied")
        ended = self._run_stage()
        state.ended, state.seconds = time.time(), time.monotonic() - self._stage_began
        state.metrics = final_metrics(work.record.events_path, work.node.id, began)
        state.memory, state.gpu_memory = ended.memory, ended.gpu_memory
        if ended.status == "done":
            return self._committed(ended, before)
        return AttemptResult(status=ended.status, failure=ended.failure, log_tail=ended.log_tail)

    def _committed(self, ended: StageExit, before: Snapshot) -> AttemptResult:
        """Commit what the stage made, unless it may have read other data than its key says.

        A file that was written and holds the same now may have held something else in between. That is unlikely: it
        counts where running again costs little, for an op that cannot resume.
        """
        work, meanwhile = self.work, before.since(self.work.store)
        resumable = work.node.op.resumable
        changed = list(meanwhile.changes) or ([] if resumable else _written(meanwhile.written))
        if changed:
            kept = str(work.lease.set_aside()) if resumable else ""
            if not resumable:
                work.lease.remove()
            return AttemptResult(status="outdated", changes=tuple(changed), kept=kept)
        for file in meanwhile.written:
            text = f"{file} was written while the stage ran; its content is the same now"
            work.record.event(work.node.id, "warning", message=text)
        for file in before.unseen(ended.loaded):
            text = f"not part of the key: {file}, which the op finds at run time only; name it in its chosen_code()"
            work.record.event(work.node.id, "warning", message=text)
        fail_point("run:commit-begin")
        self._commit(ended.device)
        fail_point("run:committed")
        return AttemptResult(status="done")

    @property
    def _sources(self) -> Path:
        return self.work.lease.path("code", ".json")

    def _is_finished(self) -> bool:
        """Whether the holder before was cut off after its stage had ended, so that only the commit was left to do."""
        work, node_id = self.work, self.work.node.id
        if work.store.finish_commit(work.lease, work.key) is None:
            return False
        with artifacts_taken(work.store.path):
            decision = made_meanwhile(work.store, work.key, work.record.run, forced=work.forced)
            if decision is None:
                return False
            work.lease.remove()
            SourceRuns(work.store).take(work.record, node_id, decision)
            work.record.save_node(node_id)
        return True

    def _run_stage(self) -> StageExit:
        work = self.work
        self._stage_began = time.monotonic()
        with self._lock:
            if self._is_asked:
                return StageExit("stopped")
            self._stage = stage = StageProcess(
                self._children,
                work.lease,
                self._spec(),
                work.node.launch,
                self._share,
                work.record.log_path(work.node.id),
                lambda text: work.record.event(work.node.id, "info", message=text),
                secret_values(work.node.config),
            )
        fail_point("stage:started")
        ended = stage.wait()
        with self._lock:
            self._stage = None  # from now on there is nobody to be asked, and soon no folder to ask in
        fail_point("stage:ended")
        if self.is_timed_out and ended.status != "done":
            seconds = f"{work.node.launch.timeout:g}"
            text = f"TimeoutError: the attempt took longer than launch.timeout = {seconds} s"
            failure = Failure(text, (TIMEOUT, TimeoutError.__name__))
            return attrs.evolve(ended, status="failed", failure=failure, log_tail=stage.tail())
        return ended

    def _spec(self) -> StageSpec:
        work, lease, launch = self.work, self.work.lease, self.work.node.launch
        return StageSpec(
            node=work.node.id,
            node_json=node_to_json(work.graph, work.node.id),
            search_path=tuple(search_path(work.graph.op_files)),
            sources=self._sources,
            artifacts={parent: (work.store.object_path(digest), digest) for parent, digest in work.digests.items()},
            folder=lease.folder,
            token=lease.token,
            lease_id=lease.id,
            out_dir=lease.out_dir,
            work_dir=lease.work_dir,
            life_line=lease.path("alive"),
            results=lease.path("results"),
            events=work.record.events_path,
            figures=work.record.folder / "figures" / work.node.id,
            attempt=self._state.attempt,
            device=launch.device,
            sp_degree=launch.sp_degree,
        )

    def _is_anew(self) -> bool:
        """Whether the node starts with an empty work folder: it is forced, and neither this run started it yet nor the
        one that this run goes on from, which left its work folder here."""
        last_run = self.work.lease.last_run
        began = self._state.attempt or (last_run and last_run == self.work.record.state.goes_on_from)
        return self.work.forced and not began

    def _without_code(self) -> str:
        return self.work.parts.key_without_code(node_inputs(self.work.node, self.work.digests.__getitem__))

    def _adopt_work(self) -> None:
        """Move the newest unleased work folder of the same key without code here."""
        lease = self.work.lease
        if lease.work_dir.exists() and any(lease.work_dir.iterdir()):
            return
        run = lease.adopt(self._without_code())
        if run is not None:
            text = f"{self.work.node.id}: goes on with the work of run {run}, though the code has changed since"
            self._tell(lambda: self._display.note(text))

    def _inherit_events(self) -> None:
        """Where another run left the work folder behind, its metrics are the beginning of this run's."""
        record, run = self.work.record, self.work.lease.last_run
        if run is None or run == record.run or self._state.attempt:
            return
        earlier = [
            event
            for event in read_events(self.work.store.records / run / "events.jsonl")
            if event["node"] == self.work.node.id and event["kind"] in ("metric", "cut")
        ]
        if earlier:
            append_lines(record.events_path, earlier)
            self._state.attempt = earlier[-1]["attempt"]

    def _commit(self, device: str) -> None:
        """Make the artifact. Raises StageError, StoreError or OSError where there is none to be had."""
        work, node, state = self.work, self.work.node, self._state
        earlier = work.store.index(work.key)
        config = {name: getattr(node.config, name) for name in node.op.fields}
        layout = {name: getattr(node.launch, name) for name in LAYOUT}
        launch = {**layout, "threads": self._share.threads, "device": device}
        neutral = {name: config[name] for name, spec in node.op.fields.items() if spec.neutral}
        manifest = {
            "format": 1,
            "node": node.id,
            "op": node.op.name,
            "run": work.record.run,
            "key_parts": work.parts.to_json(),
            "config": config,
            "launch": launch,
            "inputs": node_inputs(node, work.digests.__getitem__),
            "metrics": state.metrics,
            "started": state.started,
            "ended": state.ended,
        }
        state.acceptance = "forced" if work.forced else "computed"
        settings = _plain({**neutral, "launch": launch})
        line = {
            "run": work.record.run,
            "neutral": settings,
            "acceptance": state.acceptance,
            "without_code": self._without_code(),
        }
        state.digest = work.store.commit(work.lease, work.key, _plain(manifest), line)
        work.lease.remove()
        if earlier and earlier[-1].digest != state.digest:
            self._report_difference(earlier[-1].digest, state.digest, same=earlier[-1].neutral == settings)

    def _report_difference(self, before: str, now: str, *, same: bool) -> None:
        cause = "the op is not deterministic" if same else "settings outside the key (launch, neutral fields) differ"
        message = f"{self.work.node.id}: the same key gave {before[:12]} before and {now[:12]} now: {cause}"
        self.work.record.event(self.work.node.id, "differs", message=message)
        self._tell(lambda: self._display.warn(message))


def _written(files: Sequence[str]) -> list[str]:
    return [f"written meanwhile: {', '.join(files)}"] if files else []


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """The value as JSON gives it back: tuples are lists."""
    plain: dict[str, Any] = json.loads(json.dumps(value, default=os.fspath))
    return plain
