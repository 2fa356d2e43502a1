"""The loop over the plan: take what the store holds, run the rest as stages, commit, and keep the record."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import attrs

from dsl.errors import StageError, StoreError
from dsl.graph import GraphNode
from executor.begin import Session, plan_row, refreshed
from executor.follow import Follower, lacks
from executor.jsonlines import LineReader, append_line, read_lines, write_json
from executor.keys import node_inputs
from executor.launch import Outcome, StageProcess, threads_of
from executor.lease import Lease
from executor.plan import Decision
from executor.record import STATE, NodeState, Record, State, Status, final_metrics
from executor.table import Display

STAGE_POLL_S = 0.1
WARNING = "warning: "
GRACE_S = 30.0
GRACE_NOT_RESUMABLE_S = 3.0
STATE_AFTER: dict[str, State] = {"done": "done", "stopped": "pending", "failed": "failed"}


class StopSignal:
    """Ctrl-C, SIGTERM and a closed terminal: how often and by which signal this run was asked to stop."""

    def __init__(self) -> None:
        self.number = 0
        self.count = 0

    def is_set(self) -> bool:
        return self.count > 0

    @contextmanager
    def caught(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, self._note) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self.count += 1


def run_session(session: Session, display: Display, *, adopt: bool = False) -> int:
    """Run what is stale, node after node. Returns the exit code: 0 only when every node is done.

    1 where a node failed; 128 + the signal's number where the run was asked to stop.
    """
    runner = Runner(session, display, adopt)
    with runner.stop.caught(), display:
        status = runner.run()
    if status == "stopped":
        return 128 + runner.stop.number
    return 0 if status == "done" else 1


class Runner:
    """One pass over the nodes of a session."""

    def __init__(self, session: Session, display: Display, adopt: bool) -> None:
        self.stop = StopSignal()
        self._store = session.store
        self._record = session.record
        self._planner = session.planner
        self._graph = session.graph
        self._display = display
        self._adopt = adopt
        self._digests: dict[str, str] = {}
        self._follower: Follower | None = None

    def run(self) -> Status:
        status: Status = "failed"
        try:
            status = self._nodes()
        finally:
            self._finish(status)
        return status

    def _nodes(self) -> Status:
        for node_id in self._graph.nodes:
            if self.stop.is_set():
                return "stopped"
            if not self._node(node_id):
                return "failed" if self._state(node_id).state == "failed" else "stopped"
        return "done"

    def _finish(self, status: Status) -> None:
        self._record.state.status = status
        self._record.state.ended = time.time()
        self._record.state.results_run = self._results_run()
        self._record.save()
        if self._follower is None and lacks(self._record):  # the executor died before it had sent all
            self._follower = Follower(self._store.path, self._record.folder)
        if self._follower is not None:
            warning = self._follower.finish(lambda: self.stop.count > 1)
            if warning:
                self._display.warn(warning)
        self._record.unlock()

    def _state(self, node_id: str) -> NodeState:
        return self._record.state.nodes[node_id]

    def _node(self, node_id: str) -> bool:
        """Make sure of one node's artifact; False where it failed or was stopped."""
        decision = self._planner.decide(node_id, self._digests)
        if decision.cache == "hit":
            assert decision.digest is not None
            self._take(node_id, decision.key, decision.digest)
            return True
        decision = self._refreshed(node_id)
        assert decision.key is not None
        state = self._state(node_id)
        state.key, state.reason = decision.key, decision.reason
        with self._store.lease(decision.key, self._record.run) as lease:
            if not lease.acquire(lambda holder: self._display.note(f"{node_id}: waiting, {holder}"), self.stop.is_set):
                return False
            self._store.finish_commit(lease, decision.key)
            made_meanwhile = self._made_meanwhile(node_id, decision.key)
            if made_meanwhile is not None:
                lease.remove()
                self._take(node_id, decision.key, made_meanwhile)
                return True
            return self._execute(self._graph.nodes[node_id], decision.key, lease)

    def _refreshed(self, node_id: str) -> Decision:
        """The decision for a node that will run, by its code and data as its stage will find them."""
        planner = refreshed(self._store, self._planner, node_id)
        decision = planner.decide(node_id, self._digests)
        if planner.parts[node_id] != self._planner.parts[node_id]:
            self._planner = planner
            self._record.save_plan({**self._record.plan(), node_id: plan_row(planner, node_id, decision)})
            self._display.note(f"{node_id}: its code or data changed since the run began; the newest is taken")
        return decision

    def _made_meanwhile(self, node_id: str, key: str) -> str | None:
        """What another run committed while this one waited, or this one just before it was killed."""
        lines = self._store.index(key)
        if not lines or not self._store.has(lines[-1].digest):
            return None
        counts = node_id not in self._planner.forced or lines[-1].run == self._record.run
        return lines[-1].digest if counts else None

    def _take(self, node_id: str, key: str | None, digest: str) -> None:
        """The artifact is there: the node is done, with the metrics of the run that made it."""
        self._digests[node_id] = digest
        if self._state(node_id).state != "done":
            self._copy_result(node_id, key, digest)
            self._record.save_node(node_id)
        self._display.changed(node_id)

    def _copy_result(self, node_id: str, key: str | None, digest: str) -> None:
        state = self._state(node_id)
        lines = [line for line in self._store.index(key or "") if line.digest == digest]
        state.state, state.key, state.digest = "done", key, digest
        if state.started and lines and lines[-1].run == self._record.run:  # killed just after it had committed
            state.ended = lines[-1].time
            state.seconds = state.ended - state.started
            state.metrics = final_metrics(self._record.events_path, node_id)
            return
        state.cache, state.reason, state.started = "hit", "", None
        state.source_run = lines[-1].run if lines else None
        state.metrics = dict((self._store.manifest(digest) or {}).get("metrics", {}))
        source = self._store.records / (state.source_run or "-")
        if (source / STATE).exists():
            made = [node for node in Record.load(source).state.nodes.values() if node.key == key and node.metrics]
            state.metrics = made[0].metrics if made else state.metrics
            state.warnings = made[0].warnings if made else []

    def _execute(self, node: GraphNode, key: str, lease: Lease) -> bool:
        state = self._state(node.id)
        lease.wait_for_ranks()
        is_anew = self._is_anew(node.id, lease.last_run)
        if self._adopt and not is_anew:
            self._adopt_work(node, lease)
        lease.empty(keep_state=not is_anew)
        resumed = any(lease.work_dir.iterdir())
        if resumed:
            self._inherit_events(node.id, lease.last_run)
        without_code = self._planner.parts[node.id].key_without_code(node_inputs(node, self._digests.__getitem__))
        write_json(lease.folder / "work.json", {"key_without_code": without_code, "node": node.id})
        state.state, state.cache, state.attempt = "running", "resumed" if resumed else "miss", state.attempt + 1
        state.started, state.ended, state.error, state.warnings = time.time(), None, None, []
        self._record.save_node(node.id)
        self._record.event(node.id, "state", state="running", cache=state.cache)
        self._display.changed(node.id)
        if self._follower is None:
            self._follower = Follower(self._store.path, self._record.folder)
        outcome = self._run_stage(node, lease)
        state.ended = time.time()
        state.seconds = state.ended - state.started
        state.metrics = final_metrics(self._record.events_path, node.id)
        if outcome.status == "done":
            try:
                self._commit(node, key, lease, outcome)
            except (StageError, StoreError, OSError) as error:
                outcome = Outcome("failed", error=f"{type(error).__name__}: {error}")
        self._close(node.id, outcome)
        return outcome.status == "done"

    def _is_anew(self, node_id: str, last_run: str | None) -> bool:
        """Whether the node starts with an empty work folder: it is forced, and neither this run started it yet nor the
        one that this run goes on from, which left its work folder here."""
        began = self._state(node_id).attempt or (last_run and last_run == self._record.state.goes_on_from)
        return node_id in self._planner.forced and not began

    def _run_stage(self, node: GraphNode, lease: Lease) -> Outcome:
        artifacts = {
            parent: [str(self._store.object_path(self._digests[parent])), self._digests[parent]]
            for parent in node.parents
        }
        events = LineReader(self._record.events_path)
        events.read()
        stage = StageProcess(
            lease,
            node.launch,
            self._record.log_path(node.id),
            graph=str(self._record.folder / "graph.json"),
            node=node.id,
            artifacts=artifacts,
            events=str(self._record.events_path),
            figures=str(self._record.folder / "figures" / node.id),
            attempt=self._state(node.id).attempt,
        )
        grace = GRACE_S if node.op.resumable else GRACE_NOT_RESUMABLE_S
        while not stage.wait(STAGE_POLL_S):
            self._show(node.id, stage, events)
            if self.stop.is_set():
                if not stage.asked_for():
                    self._display.note(f"{node.id}: stopping, the stage may save its progress (again: stop at once)")
                stage.ask_to_stop()
                if self.stop.count > 1 or stage.asked_for() > grace:
                    stage.kill()
        self._show(node.id, stage, events)
        return stage.close()

    def _show(self, node_id: str, stage: StageProcess, events: LineReader) -> None:
        warnings = self._state(node_id).warnings
        for text in stage.notes():
            self._display.note(f"{node_id}: {text}")
            if text.startswith(WARNING) and text.removeprefix(WARNING) not in warnings:
                warnings.append(text.removeprefix(WARNING))
        self._display.show(events.read())

    def _commit(self, node: GraphNode, key: str, lease: Lease, outcome: Outcome) -> None:
        state = self._state(node.id)
        earlier = self._store.index(key)
        config = {name: getattr(node.config, name) for name in node.op.fields}
        launch = {**attrs.asdict(node.launch), "threads": threads_of(node.launch), "device": outcome.device}
        neutral = {name: config[name] for name, spec in node.op.fields.items() if spec.neutral}
        parts = self._planner.parts[node.id]
        manifest = {
            "format": 1,
            "node": node.id,
            "op": node.op.name,
            "run": self._record.run,
            "key_parts": parts.to_json(),
            "config": config,
            "launch": launch,
            "inputs": node_inputs(node, self._digests.__getitem__),
            "metrics": state.metrics,
            "started": state.started,
            "ended": state.ended,
        }
        acceptance = "forced" if node.id in self._planner.forced else "computed"
        line = {"run": self._record.run, "neutral": _plain({**neutral, "launch": launch}), "acceptance": acceptance}
        digest = self._store.commit(lease, key, _plain(manifest), line)
        lease.remove()
        state.digest = self._digests[node.id] = digest
        if earlier and earlier[-1].digest != digest:
            self._report_difference(node.id, earlier[-1].digest, digest, same=earlier[-1].neutral == line["neutral"])

    def _report_difference(self, node_id: str, before: str, now: str, *, same: bool) -> None:
        cause = "the op is not deterministic" if same else "settings outside the key (launch, neutral fields) differ"
        message = f"{node_id}: the same key gave {before[:12]} before and {now[:12]} now: {cause}"
        self._record.event(node_id, "warning", message=message)
        self._display.warn(message)

    def _close(self, node_id: str, outcome: Outcome) -> None:
        """Put down how the node ended, and show a failure with the end of its log."""
        state = self._state(node_id)
        state.state = STATE_AFTER[outcome.status]
        state.error = outcome.error or None
        self._record.save_node(node_id)
        self._record.event(node_id, "state", state=state.state, digest=state.digest, error=state.error)
        self._display.changed(node_id)
        if outcome.status == "failed":
            self._display.failure(node_id, outcome.error, outcome.log_tail, self._record.log_path(node_id))

    def _inherit_events(self, node_id: str, run: str | None) -> None:
        """Where another run left the work folder behind, its metrics are the beginning of this run's."""
        if run is None or run == self._record.run or self._state(node_id).attempt:
            return
        for event in read_lines(self._store.records / run / "events.jsonl"):
            if event["node"] == node_id and event["kind"] in ("metric", "cut"):
                append_line(self._record.events_path, event)
                self._state(node_id).attempt = event["attempt"]

    def _adopt_work(self, node: GraphNode, lease: Lease) -> None:
        """Move the newest unleased work folder of the same key without code here."""
        without_code = self._planner.parts[node.id].key_without_code(node_inputs(node, self._digests.__getitem__))
        if lease.work_dir.exists() and any(lease.work_dir.iterdir()):
            return
        run = lease.adopt(without_code)
        if run is not None:
            self._display.note(f"{node.id}: goes on with the work of run {run}, though the code has changed since")

    def _results_run(self) -> str | None:
        """The run that made the last node's artifact: it holds the results of a run in which nothing ran."""
        nodes = list(self._record.state.nodes.values())
        if any(node.cache in ("miss", "resumed") for node in nodes):
            return self._record.run
        return next((node.source_run for node in reversed(nodes) if node.source_run), None)


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """The value as JSON gives it back: tuples are lists."""
    plain: dict[str, Any] = json.loads(json.dumps(value, default=os.fspath))
    return plain
