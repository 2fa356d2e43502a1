"""Brings MLflow to hold what it is to hold of a run, see contents.py.

Each of its runs is replayed: MLflow's runs are found by their tags, they say what they have, and what is sent again
changes nothing (a point that a folder of files has already is there twice). A run is closed when all of it was sent. So
a call may fail, or be killed, at any place, and the next one sends what is missing: while the run is in progress, after
a resume, or by `dflow sync` once a server is back.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from dsl.errors import NotTrusted, StageError, StoreError
from dsl.graph import GraphNode
from dsl.imports import no_collection
from dsl.op_class import hook
from dsl.secrets import redact, secret_names, values_of
from dsl.shown import shown_bytes
from executor.records.events import EventReader, NodeEvents
from executor.records.run_record import LOG, NodeState, Record, load_begun
from executor.results.op_hooks import Part, Request, shown_by_ops
from executor.system.output import counted
from executor.system.symlinks import is_plain
from executor.system.trust import require_own_store
from executor.tracking.contents import (
    ACCEPTED,
    ARTIFACT,
    FAILURE,
    RESTARTS,
    UPLOADED,
    WHOLE,
    Contents,
    Measured,
    MlflowRun,
    ModelFiles,
    Place,
    artifact_files,
    columns,
    judgement,
    whole_artifact,
)
from executor.tracking.mlflow_client import (
    UNREACHABLE,
    HeldRun,
    Tracker,
    is_transient,
    shown_error,
    tracking_uri,
)
from executor.tracking.publisher import ReportWriter
from executor.tracking.run_description import shown_notes
from executor.tracking.sync_state import SentPart, SentRun, log_size

POINTS_AT_ONCE = 2000
LOCKED_TRIES = 15
CLOSING_ORDER = ("node", "combination", "run")  # the order in which runs are closed


class Replay:
    """Sends one run to MLflow; each call of `send` brings MLflow up to date with the record.

    is_live: the run is in progress. report: writes the run's report, maybe while MLflow is still unreachable. counts:
    of runs, points and files sent. say: called with what takes long. The caller holds the record's lock.
    """

    def __init__(
        self,
        store: Path,
        folder: Path,
        *,
        is_live: bool = False,
        report: ReportWriter | None = None,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._store = store
        self._folder = folder
        self._is_live = is_live
        self._report = report or ReportWriter(store, folder)
        self._say = say
        self._reader = EventReader(folder / LOG)
        self._events: dict[str, NodeEvents] = {}
        self._warning: str | None = None
        self._held: dict[Place, HeldRun] | None = None  # None: MLflow has to be asked
        self._sent_points: Counter[Place] = Counter()
        self._is_described: set[Place] = set()  # parameters were sent
        self._models: dict[str, str | None] = {}  # by node; None where it failed
        self._is_elsewhere: dict[str, bool] = {}  # whether another run uploaded a node's artifact
        self._sent = SentRun.read(folder) or SentRun()

    def send(self) -> str | None:
        """Send what MLflow lacks. Returns a warning where it did not receive everything; the record keeps the rest.

        The warning shows no secret of the tracking URI.
        """
        warning = self._sent_or_warned()
        return None if warning is None else redact(warning, self._secrets)

    def _sent_or_warned(self) -> str | None:
        self._warning = None
        self._secrets: tuple[str, ...] = ()
        try:
            self._record = Record.load(self._folder)
            if not self._sent.parent and not self._record.state.is_for_mlflow:
                return None
            self._secrets = values_of(secret_names(self._record.state.tracking_uri or ""))
            self._try()
        except StoreError as error:
            return f"MLflow lacks a part of the run: {error}; then send it with `dflow sync {self._folder.name}`"
        except NotTrusted as error:
            how = f"read it, then send it with `dflow sync {self._folder.name} --trust`"
            return f"MLflow lacks a part of the run: {error.what}; {how}"
        except UNREACHABLE as error:
            self._held = None
            if "file is not a database" in str(error):
                return (
                    f"{self._store / 'mlflow.db'} is no database: move it away, then send all again with "
                    "`dflow sync --all`"
                )
            what = "cannot be reached" if is_transient(error) else "refused a part of the run"
            kept = f"nothing is lost: send it later with `dflow sync {self._folder.name}`"
            return f"MLflow {what} ({shown_error(error)}); {kept}"
        return self._warning

    def _try(self) -> None:
        for tries_left in reversed(range(LOCKED_TRIES)):
            try:
                self._send()
            except UNREACHABLE as error:  # SQLite fails at once where waiting could deadlock
                if tries_left == 0 or "database is locked" not in str(error):
                    raise
                self._held = None
                time.sleep(random.uniform(0.1, 1.0))
            else:
                return

    @cached_property
    def _contents(self) -> Contents:
        return Contents(self._store, self._record.graph())

    @cached_property
    def _tracker(self) -> Tracker:
        """The tracker, made on first use; everything is sent again if MLflow no longer has the run.

        Raises StoreError where the run was deleted in MLflow.
        """
        require_own_store(self._store)
        uri = tracking_uri(self._store, self._record.state.tracking_uri, self._contents.graph.root)
        with no_collection():  # MLflow imports the rest of itself
            tracker = Tracker(self._store, uri, self.counts, self._say)
        parent = self._sent.parent
        stage = tracker.stage_of(parent) if parent else None
        if stage == "deleted":
            raise StoreError(f"its run {parent} was deleted in MLflow; restore it there")
        if parent and stage is None:
            self._sent = SentRun()
        return tracker

    def _send(self) -> None:
        self._find_runs()
        record = self._record
        is_running = self._is_live and record.state.status == "running"
        size = log_size(self._folder)
        for event in self._reader.read():
            self._events.setdefault(event.node, NodeEvents()).add(event)
        was_sent = self._sent.events == size
        runs = self._contents.runs(record, self._events, is_live=self._is_live)
        for run in runs:
            self._begin(run)
        if not is_running:
            self._models = {node: model for node, model in self._models.items() if model is not None}  # tried again
        for run in sorted(runs, key=lambda run: CLOSING_ORDER.index(run.place[0])):
            self._bring_up_to_date(run, is_last=not (is_running or was_sent))
        self._upload(at_most=1 if is_running else None)
        self._sent.events = None if is_running or self._warning else size
        self._save()

    def _find_runs(self) -> None:
        """Ask MLflow for the runs that it has of this run. Of several for the same part, which a failed call may leave,
        one stays.
        """
        if self._held is not None:
            return
        tracker = self._tracker  # which may have lost what was sent
        if not self._sent.experiment:
            shown = columns(self._record, self._contents.graph, self._contents.combinations)
            self._sent.experiment = tracker.experiment(self._record.state.experiment, *shown)
        known = {self._sent.parent, *(part.run_id for part in self._sent.nodes.values())}
        known |= {part.run_id for part in self._sent.combinations.values()}
        held = {}
        for place, runs in tracker.runs_of(self._sent.experiment, self._record.run).items():
            held[place] = next((run for run in runs if run.run_id in known), runs[0])
            for run in runs:
                if run is not held[place]:
                    tracker.delete_run(run.run_id)
        self._held = held
        self._is_described.clear()
        self._sent_points.clear()

    def _begin(self, run: MlflowRun) -> None:
        """Find or create an MLflow run, with its parameters; it stays open while in progress."""
        held = self._held_of(run)
        if run.place not in self._is_described:
            if not held.params:  # inputs come first, so that they are there where any parameter is
                self._tracker.log_inputs(held.run_id, run.reads)
            self._tracker.log_params(held, run.params())
            self._is_described.add(run.place)
        if run.status == "RUNNING":
            self._tracker.run_again(held)

    def _held_of(self, run: MlflowRun) -> HeldRun:
        """The existing or a new run in MLflow; its id is kept in mlflow.json."""
        assert self._held is not None
        before = self._held.get(run.place)
        if before is not None and before.tags.get(RESTARTS) != run.first_tags.get(RESTARTS):
            self._tracker.delete_run(before.run_id)  # MLflow cannot delete single points
            del self._held[run.place]
            self._is_described.discard(run.place)
            self._sent_points.pop(run.place, None)
        if run.place not in self._held:
            above = {} if run.below is None else {"mlflow.parentRunId": self._held[run.below].run_id}
            tags = {**above, **run.first_tags, **run.tags}
            self._held[run.place] = self._tracker.create_run(self._sent.experiment, run.started, tags)
        run_id = self._held[run.place].run_id
        kind, name = run.place
        parts = self._sent.nodes if kind == "node" else self._sent.combinations
        if run.place == WHOLE:
            if run_id != self._sent.parent:
                self._sent.parent, self._sent.notes = run_id, ("", shown_notes(self._contents.graph))
                self._save()
        elif name not in parts or parts[name].run_id != run_id:
            parts[name] = SentPart(run_id)
            self._save()
        return self._held[run.place]

    def _save(self) -> None:
        self._sent.write(self._folder)

    def _bring_up_to_date(self, run: MlflowRun, *, is_last: bool) -> None:
        """Send whatever an MLflow run lacks.

        is_last: the whole run has ended, so figures that combine several nodes may have changed.
        """
        held = self._held_of(run)
        changed = {name for name, value in run.tags.items() if held.tags.get(name) != value} - {ACCEPTED}
        outdated = [name for name in FAILURE if name in held.tags and name not in run.tags]
        is_open = run.status == "RUNNING"
        is_behind = run.status != held.status or changed or outdated or (is_last and run.place[0] != "node")
        if is_open or is_behind:
            self._send_points(run, held)
        if is_behind and not is_open:
            self._end(run, held, outdated)
        self._tracker.log_tags(held, run.tags)

    def _send_points(self, run: MlflowRun, held: HeldRun) -> None:
        while run.points is not None and self._sent_points[run.place] < len(run.points.points):
            start = self._sent_points[run.place]
            points = run.points.points[start : start + POINTS_AT_ONCE]
            self._tracker.log_points(held.run_id, points, run.points.names)
            self._sent_points[run.place] += len(points)

    def _end(self, run: MlflowRun, held: HeldRun, outdated: list[str]) -> None:
        """Send the final contents of an MLflow run, and close it. All of it may be sent a second time."""
        tracker, (kind, name) = self._tracker, run.place
        ending = run.ending(self._sent.experiment, self._sent.parent)
        if kind == "node" and held.tags.get("dflow.digest") != run.tags["dflow.digest"]:
            tracker.delete_tag(held, UPLOADED)
        if kind != "node":
            self._judge_models(held, ending.results)
        tracker.log_results(held.run_id, [*ending.results.values(), *ending.best])
        tracker.log_files(held, self._report_file() if run.place == WHOLE else ending.files, ending.references)
        tracker.log_inputs(held.run_id, ending.reads)
        if kind == "node":
            self._models.pop(name, None)
            self._model(self._contents.graph.nodes[name])
        else:
            sent = self._sent if run.place == WHOLE else self._sent.combinations[name]
            sent.notes = (*sent.notes[-1:], ending.note)
            self._save()
            tracker.log_note(held, ending.note, sent.notes)
        tracker.log_tags(held, run.tags)
        for tag in outdated:
            tracker.delete_tag(held, tag)
        tracker.close(held, run.status, ending.ended)

    def _report_file(self) -> dict[str, Path]:
        written = self._report.written()
        if written.code == 0:
            return {self._report.file.name: self._report.file}
        with suppress(OSError):
            self._report.file.unlink()  # of an earlier moment of the run
        reason = f"the report of the run could not be written ({written.reason})"
        self._warning = f"{reason}; write it with: dflow report {self._record.run}"
        return {}

    # Artifacts that are models.

    def _judge_models(self, held: HeldRun, found: Mapping[str, Measured]) -> None:
        """Link final metrics to each logged model that they evaluate: those of nodes below the model's node."""
        graph, tracker = self._contents.graph, self._tracker
        for node in graph.nodes.values():
            judged = [each for node_id, each in found.items() if node_id in graph.below(node.id)]
            model_id = self._model(node) if judged else None
            if model_id is not None:
                tracker.log_results(held.run_id, judged, model_id)
                tracker.tag_model(model_id, judgement(graph, judged))
                tracker.log_output(held.run_id, model_id)

    def _model(self, node: GraphNode) -> str | None:
        """The id of a node's artifact as a logged model of MLflow; None where it is no model, or could not be made."""
        state = self._record.state.nodes[node.id]
        if state.state != "done" or state.digest is None or hook(node.op, "logged_model") is None:
            return None
        if node.id not in self._models:
            try:
                self._models[node.id] = self._made_model(node, state.digest)
            except StageError as error:
                self._models[node.id] = None
                self._warning = f"MLflow lacks the model of {node.id}: {error}; try it: dflow sync {self._folder.name}"
        return self._models[node.id]

    def _made_model(self, node: GraphNode, digest: str) -> str | None:
        """The id of a node's artifact as a logged model, created if missing. Raises StageError if the op describes
        none.
        """
        tracker, folder, child = self._tracker, self._store / "objects" / digest, self._sent.nodes[node.id].run_id
        model_id = tracker.ready_model(self._sent.experiment, digest)
        if model_id is None:
            if not folder.is_dir():
                return None
            asked = Request("logged_model", node.op.name, self._contents.graph.op_files, (Part(folder, {}),))
            shown = shown_by_ops([asked])[asked]
            if shown.model is None:
                raise StageError(f'logged_model() of op "{node.op.name}" failed: {shown.failed}')
            small, large = artifact_files(folder, {})  # a model is one for all runs, whatever they measured
            files = ModelFiles(child, {name.removeprefix(ARTIFACT): path for name, path in small.items()}, large)
            model_id = tracker.logged_model(self._sent.experiment, node.id, digest, shown.model, files)
        tracker.log_output(child, model_id)
        return model_id

    # Whole artifacts.

    def _upload(self, at_most: int | None) -> None:
        """Send the whole artifacts of the nodes in the pipeline's `upload`; files that MLflow has are not sent again.

        at_most: the number of files in this call, so that the rest of a live run does not wait long.
        """
        assert self._held is not None
        for node in self._contents.graph.nodes.values():
            state, held = self._record.state.nodes[node.id], self._held.get(("node", node.id))
            if (
                not self._contents.graph.is_uploaded(node)
                or held is None
                or state.state != "done"
                or UPLOADED in held.tags
            ):
                continue
            if node.id not in self._is_elsewhere:
                self._is_elsewhere[node.id] = self._is_uploaded_by_maker(state)
            if not self._is_elsewhere[node.id]:
                self._upload_artifact(node, held, at_most)
                if at_most is not None:
                    return

    def _upload_artifact(self, node: GraphNode, held: HeldRun, at_most: int | None) -> None:
        files = whole_artifact(self._record, node.id)
        wrong = [name for name, path in files.items() if not is_plain(path, self._store)]
        if wrong or not files:
            why = (
                f"{wrong[0]} is missing, or a link: see `dflow doctor --verify`"
                if wrong
                else "the store no longer holds it"
            )
            self._warning = f"MLflow lacks the artifact of {node.id}: {why}"
            return
        sizes = {name: path.stat().st_size for name, path in files.items()}
        there = self._tracker.files_of(held, ARTIFACT.rstrip("/"))
        missing = [name for name, size in sizes.items() if there.get(name) != size]
        whole = f"{counted(len(files), 'file')}, {shown_bytes(sum(sizes.values()))}"
        self._tracker.say_once(f"uploading the artifact of {node.id} to MLflow: {whole}")
        sent = missing[:at_most]
        for name in sent:
            self._tracker.log_files(held, {name: files[name]}, {})
        if sent == missing:
            self._tracker.log_tags(held, {UPLOADED: whole})

    def _is_uploaded_by_maker(self, state: NodeState) -> bool:
        """Whether the run that computed a cached artifact has uploaded it to the same MLflow."""
        run = state.source_run if state.cache == "hit" else None
        maker = load_begun(self._store / "records" / run) if run is not None else None
        if maker is None or maker.state.tracking_uri != self._record.state.tracking_uri:
            return False
        child = self._contents.maker(state)
        return child is not None and bool(self._tracker.tag_of(child, UPLOADED))
