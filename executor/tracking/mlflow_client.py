"""MLflow as dflow uses it; the only module that imports mlflow.

Every call can be made again: it finds what it did already. So whoever calls may be killed at any place.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import posixpath
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import mlflow.entities
import mlflow.exceptions
import sqlalchemy.engine
import sqlalchemy.event
import sqlalchemy.exc
from google.protobuf.json_format import ParseError
from mlflow.entities import DatasetInput, InputTag, LoggedModelOutput, Metric, Param, RunTag
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking import MlflowClient

from dsl.errors import StoreError
from dsl.secrets import resolved_text
from executor.records.metric_points import Point
from executor.system.jsonlines import write_json
from executor.system.symlinks import open_own
from executor.tracking.node_files import Dataset, ModelFiles, mlmodel, model_name
from ops.lib.logged_model import LoggedModel

METRICS_IN_A_BATCH = 1000
PARAMS_IN_A_BATCH = 100
PARAM_LENGTH = 6000
NAME_LENGTH = 250
TAG_LENGTH = 5000
DIGEST_LENGTH = 36  # of a dataset
FOUND_AT_ONCE = 1000
LOCK_TIMEOUT_S = 60
NOTE = "mlflow.note.content"
Place = tuple[str, str]  # "node" and its id, "combination" and its name
WHOLE: Place = ("run", "")
CREDENTIALS = re.compile(r"//[^/@\s]+@")
# How the HTTP library tells which server it did not reach, and what the operating system said.
AWAY = re.compile(r"host='([^']+)', port=(\d+)|API request to \w+://(?:[^/@\s]*@)?([^/:\s]+):(\d+)")
BROKEN = re.compile(r"(?:RemoteDisconnected\(|(?:ConnectionReset|ConnectionAborted|BrokenPipe)Error\(\d+, )'([^']+)'")
REFUSED = re.compile(r"(?:\[Errno -?\d+\] |: )(Read timed out|(?<=\] )[^'\")]+)")
SHOWN_ERROR = 300  # characters
UNREACHABLE = (
    mlflow.exceptions.MlflowException,
    sqlalchemy.exc.SQLAlchemyError,
    ParseError,  # another server answers there
    OSError,
)
# Codes of errors that another try, or another server, may not have.
PASSING = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "ENDPOINT_NOT_FOUND")


class Tracker:
    """The tracking server or database of a store's runs. sent counts the runs, points and files that it was given."""

    def __init__(self, store: Path, uri: str) -> None:
        self._store = store
        self._uri = uri
        self.client = open_client(store, uri)
        self.sent: Counter[str] = Counter()
        self._places: dict[str, str] = {}  # of the files of runs that were made by this tracker

    def experiment(self, name: str) -> str:
        """The id of the experiment, which is made where there is none. Raises StoreError where it was deleted."""
        with _locked(self._store, self._uri):
            known = self.client.get_experiment_by_name(name)
            if known is None:
                return str(self.client.create_experiment(name, artifact_location=self._artifact_location()))
        if known.lifecycle_stage != "active":
            raise StoreError(
                f'the experiment "{name}" was deleted in MLflow; restore it: MLFLOW_TRACKING_URI={self._uri} '
                f"mlflow experiments restore --experiment-id {known.experiment_id}"
            )
        return str(known.experiment_id)

    def _artifact_location(self) -> str | None:
        """Files lie in the store, where neither a server nor a folder of runs has a place of its own for them."""
        has_place = urlsplit(self._uri).scheme in ("http", "https", "file")
        return None if has_place else (self._store / "mlartifacts").as_uri()

    def runs_of(self, experiment: str, run: str) -> dict[Place, list[str]]:
        """Ids of the MLflow runs of a run of dflow, by what they stand for."""
        found: dict[Place, list[str]] = {}
        token = None
        while True:
            page = self.client.search_runs([experiment], f"tags.`dflow.run` = '{run}'", 1, FOUND_AT_ONCE, None, token)
            for entry in page:
                found.setdefault(_place(entry.data.tags), []).append(str(entry.info.run_id))
            token = page.token
            if not token:
                return found

    def stage_of(self, run_id: str) -> str | None:
        """ "active" or "deleted"; None where there is no such run."""
        try:
            return str(self.client.get_run(run_id).info.lifecycle_stage)
        except mlflow.exceptions.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def create_run(self, experiment: str, started: float, tags: Mapping[str, str]) -> str:
        run = self.client.create_run(experiment, start_time=_milliseconds(started), tags=_cut(tags))
        self.sent["runs"] += 1
        self._places[run.info.run_id] = run.info.artifact_uri
        return str(run.info.run_id)

    def delete_run(self, run_id: str) -> None:
        if self.stage_of(run_id) == "active":
            self.client.delete_run(run_id)

    def run_again(self, run_id: str) -> None:
        self.client.update_run(run_id, status="RUNNING")

    def close(self, run_id: str, status: str, ended: float) -> None:
        self.client.set_terminated(run_id, status=status, end_time=_milliseconds(ended))

    def log_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        self.client.log_batch(run_id, tags=[RunTag(name, value) for name, value in _cut(tags).items()])

    def delete_tag(self, run_id: str, name: str) -> None:
        if name in self.client.get_run(run_id).data.tags:
            self.client.delete_tag(run_id, name)

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        listed = [Param(_name(name), value[:PARAM_LENGTH]) for name, value in params.items()]
        for start in range(0, len(listed), PARAMS_IN_A_BATCH):
            self.client.log_batch(run_id, params=listed[start : start + PARAMS_IN_A_BATCH])

    def log_points(self, run_id: str, points: Sequence[Point], *, some_are_there: bool) -> None:
        """some_are_there: an earlier call may have sent a part of them, so what MLflow has is looked up first."""
        metrics = [metric for point in points for metric in _metrics(point)]
        if some_are_there:
            there = {name: self._history(run_id, name) for name in {metric.key for metric in metrics}}
            metrics = [metric for metric in metrics if _identity(metric) not in there[metric.key]]
        for start in range(0, len(metrics), METRICS_IN_A_BATCH):
            self.client.log_batch(run_id, metrics=metrics[start : start + METRICS_IN_A_BATCH])
        self.sent["points"] += len(metrics)

    def _history(self, run_id: str, name: str) -> set[tuple[int, int, str]]:
        return {_identity(metric) for metric in self.client.get_metric_history(run_id, name)}

    def log_results(self, run_id: str, results: Iterable[tuple[float, Mapping[str, float]]]) -> None:
        """(time, values) without a history, at step 0: values that are the latest already are not sent again."""
        metrics = [metric for when, values in results for metric in _metrics(Point(when, 0, values))]
        latest = self.client.get_run(run_id).data.metrics if metrics else {}
        fresh = [metric for metric in metrics if not _is_latest(metric, latest)]
        for start in range(0, len(fresh), METRICS_IN_A_BATCH):
            self.client.log_batch(run_id, metrics=fresh[start : start + METRICS_IN_A_BATCH])
        self.sent["points"] += len(fresh)

    def log_model_results(
        self, run_id: str, model_id: str, results: Sequence[tuple[float, Mapping[str, float]]]
    ) -> None:
        """As log_results, linked to a model: what the model has of this run already is not sent again."""
        there = self.client.get_logged_model(model_id).metrics or []
        has = {metric.key: metric.value for metric in there if metric.run_id == run_id}
        for when, values in results:
            metrics = [
                Metric(metric.key, metric.value, metric.timestamp, 0, model_id=model_id)
                for metric in _metrics(Point(when, 0, values))
                if not _is_latest(metric, has)
            ]
            for start in range(0, len(metrics), METRICS_IN_A_BATCH):
                self.client.log_batch(run_id, metrics=metrics[start : start + METRICS_IN_A_BATCH])
            self.sent["points"] += len(metrics)

    def logged_model(self, experiment: str, name: str, digest: str, model: LoggedModel, files: ModelFiles) -> str:
        """The id of the model with that digest, which is made where there is none in the experiment.

        A model that a call was killed in the making of is finished.
        """
        with _locked(self._store, self._uri):
            found = self.client.search_logged_models([experiment], f"tags.`dflow.digest` = '{digest}'", max_results=1)
            entry = found[0] if found else None
            if entry is None:
                tags = _cut({**model.tags, "dflow.digest": digest})
                params = {key: value[:PARAM_LENGTH] for key, value in model.params.items()}
                entry = self.client.create_logged_model(
                    experiment, model_name(name), files.maker, tags, params, model.kind
                )
        if str(entry.status) != "READY":
            with tempfile.TemporaryDirectory() as temporary:
                for file, path in files.small.items():
                    (Path(temporary) / file).parent.mkdir(parents=True, exist_ok=True)
                    (Path(temporary) / file).symlink_to(path.absolute())
                write_json(Path(temporary) / "MLmodel", mlmodel(entry.model_id, model))
                write_json(Path(temporary) / "references.json", files.large)
                self.client.log_model_artifacts(entry.model_id, temporary)
            self.client.finalize_logged_model(entry.model_id, "READY")
        return str(entry.model_id)

    def tag_model(self, model_id: str, tags: Mapping[str, str]) -> None:
        if tags:
            self.client.set_logged_model_tags(model_id, _cut(tags))

    def log_output(self, run_id: str, model_id: str) -> None:
        """That a run made the model, or that it is one of those it has to show."""
        outputs = self.client.get_run(run_id).outputs
        there = {output.model_id for output in outputs.model_outputs} if outputs is not None else set()
        if model_id not in there:
            self.client.log_outputs(run_id, [LoggedModelOutput(model_id, 0)])

    def log_note(self, run_id: str, note: str, known: Sequence[str]) -> None:
        """Describe the run, unless somebody wrote another description than those that are known."""
        if self.client.get_run(run_id).data.tags.get(NOTE, "") in known:
            self.log_tags(run_id, {NOTE: note})

    def log_inputs(self, run_id: str, read: Iterable[Dataset]) -> None:
        inputs = []
        for each in read:
            source = json.dumps({"path": each.path, "digest": each.digest})
            dataset = mlflow.entities.Dataset(each.name[:NAME_LENGTH], each.digest[:DIGEST_LENGTH], "dflow", source)
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", each.context)]))
        if inputs:
            self.client.log_inputs(run_id, datasets=inputs)

    def log_files(self, run_id: str, files: Mapping[str, Path], references: Mapping[str, Any]) -> None:
        """All in one call, by their names in MLflow; a file that is gone can no longer be sent."""
        there = {name: path.absolute() for name, path in files.items() if path.is_file()}
        if not (there or references):
            return
        with tempfile.TemporaryDirectory() as temporary:
            top = Path(temporary)
            for name, path in there.items():
                (top / name).parent.mkdir(parents=True, exist_ok=True)
                (top / name).symlink_to(path)
            if references:
                write_json(top / "references.json", references)
            place = self._places.get(run_id)
            if place is None:
                self.client.log_artifacts(run_id, temporary)
            else:  # the client would ask for the whole run first, to learn its place
                get_artifact_repository(place, tracking_uri=self._uri).log_artifacts(temporary)
        self.sent["files"] += len(there)


def _place(tags: Mapping[str, str]) -> Place:
    """What a run of MLflow stands for."""
    for kind in ("node", "combination"):
        if f"dflow.{kind}" in tags:
            return kind, tags[f"dflow.{kind}"]
    return WHOLE


def tracking_uri(store: Path, uri: str | None, root: Path) -> str:
    """Where the runs go: SQLite in the store unless given; relative paths start from `root`, secrets are put in."""
    scheme, _, rest = resolved_text(uri or f"sqlite:///{store / 'mlflow.db'}").rpartition(":")
    if scheme == "":
        return (root / rest).as_uri()
    return f"sqlite:///{root / rest[3:]}" if scheme == "sqlite" else f"{scheme}:{rest}"


def open_client(store: Path, uri: str) -> MlflowClient:
    """A client that has been answered; a database is made or migrated under a lock, since two at once would fail."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    is_file = uri.startswith("sqlite:") and "?" not in uri
    with _locked(store, uri):
        if is_file and not _file_of(uri).exists():
            _make_database(_file_of(uri))
        # Else SQLite waits 5 s for another writer.
        client = MlflowClient(tracking_uri=f"{uri}?timeout={LOCK_TIMEOUT_S}" if is_file else uri)
        client.search_experiments(max_results=1)
    return client


def _make_database(path: Path) -> None:
    """Aside, since a first migration that was killed can never be finished; MLflow refuses what is left of it."""
    fresh = path.with_name(f".{path.name}.new")
    for leftover in (fresh, fresh.with_name(f"{fresh.name}-journal")):
        leftover.unlink(missing_ok=True)
    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "connect", _without_waiting)
    try:
        MlflowClient(tracking_uri=f"sqlite:///{fresh}").search_experiments(max_results=1)
    finally:
        sqlalchemy.event.remove(sqlalchemy.engine.Engine, "connect", _without_waiting)
    with fresh.open("rb") as file:
        os.fsync(file.fileno())
    fresh.rename(path)


def _without_waiting(connection: Any, _record: Any) -> None:
    """Of a database that counts only once it is whole, the hundreds of changes need not be on disk one by one."""
    connection.execute("PRAGMA synchronous = OFF")


def _file_of(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path)[1:])


@contextmanager
def _locked(store: Path, uri: str) -> Iterator[None]:
    """Held while something is made that several processes may make at once; beside a database that stores share."""
    folder = _file_of(uri).parent if uri.startswith("sqlite:") else store
    with os.fdopen(open_own(folder / "mlflow.lock", os.O_WRONLY | os.O_CREAT), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_passing(error: BaseException) -> bool:
    """Whether nothing is wrong but the connection or the server; else MLflow refuses what it was given."""
    return getattr(error, "error_code", PASSING[0]) in PASSING


def _metrics(point: Point) -> list[Metric]:
    stamp = _milliseconds(point.time)
    return [Metric(_name(name), value, stamp, point.step) for name, value in point.metrics.items()]


def _identity(metric: Metric) -> tuple[int, int, str]:
    """Step, time and value as every kind of store gives them back: NaN equals itself, infinity the largest number."""
    largest = sys.float_info.max
    value = metric.value if math.isnan(metric.value) else min(max(float(metric.value), -largest), largest)
    return metric.step, metric.timestamp, repr(value)


def _is_latest(metric: Metric, latest: Mapping[str, float]) -> bool:
    if metric.key not in latest:
        return False
    there = Metric(metric.key, latest[metric.key], metric.timestamp, metric.step)
    return _identity(there) == _identity(metric)


def _name(name: str) -> str:
    """The name as MLflow takes it, for those who call a metric acc@1."""
    return posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", name)).lstrip("/")[:NAME_LENGTH]


def _cut(tags: Mapping[str, str]) -> dict[str, str]:
    return {name: value[:TAG_LENGTH] for name, value in tags.items()}


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def shown_error(error: BaseException) -> str:
    """The first line, never a page of HTML, and no password of an address; of a server that is away, where and why."""
    lines: list[Any] = str(error).splitlines() or [type(error).__name__]
    line = CREDENTIALS.sub("//***@", str(lines[0]))
    where, why = AWAY.search(line), BROKEN.search(line) or REFUSED.search(line)
    if where and why:
        return f"{where[1] or where[3]}:{where[2] or where[4]}: {why[1].strip()}"
    if len(line) <= SHOWN_ERROR:
        return line
    words = line[:SHOWN_ERROR].rpartition(" ")[0] or line[:SHOWN_ERROR]
    return f"{words} ..."
