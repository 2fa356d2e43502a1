"""dflow's client of MLflow; the only module that imports mlflow.

Every call is idempotent, so the caller may be killed at any point.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import posixpath
import re
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
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

from dsl.convert import unstructure
from dsl.errors import StoreError, shortened
from dsl.files import open_own, replace_file, sync
from dsl.json_files import write_json
from dsl.secrets import resolved_text, secret_names, without_credentials
from executor.records.metric_points import Point
from executor.records.sent_run import VIEW
from executor.system.symlinks import is_plain
from executor.system.trust import TRACKING_URI, is_trusted
from executor.system.user_cache import user_cache
from executor.tracking.node_files import Dataset, ModelFiles, Reference, mlmodel, model_name
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
# A view of the table of runs, as the button "Share" of MLflow's page stores one. By default it shows no metric.
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
VIEW_COLUMNS = ("attributes.`Created`", "attributes.`Duration`", "attributes.`User`")
Place = tuple[str, str]  # "node" and its id, "combination" and its name
WHOLE: Place = ("run", "")
# The HTTP library's texts for the server that it did not reach, and the operating system's message.
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
REFUSED_VALUE = "INVALID_PARAMETER_VALUE"  # the code of an error
# Codes of errors that may not recur at another try or another server.
TRANSIENT = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "ENDPOINT_NOT_FOUND")


class Tracker:
    """The tracking server or database of a store's runs. sent: counts the runs, points and files sent to it.

    say: called once with each metric that has another name there than can be guessed, or that was refused.
    """

    def __init__(
        self, store: Path, uri: str, sent: Counter[str], say: Callable[[str], object] = lambda text: None
    ) -> None:
        self._store = store
        self._uri = uri
        self._say = say
        self._said: set[str] = set()
        self.client = open_client(store, uri)
        self.sent = sent
        self._places: dict[str, str] = {}  # places of files, of the runs created by this tracker

    def experiment(self, name: str, metrics: Iterable[str], params: Iterable[str] = ()) -> str:
        """The id of the experiment, created where it does not exist. Raises StoreError where it was deleted.

        metrics, params: the columns of its table of runs in the view that `dflow ui` links to, beside those that
        earlier runs put there.
        """
        columns = [
            *VIEW_COLUMNS,
            *(f"metrics.`{metric}`" for metric in metrics),
            *(f"params.`{param}`" for param in params),
        ]
        with _locked(self._store, self._uri):
            known = self.client.get_experiment_by_name(name)
            if known is None:
                place = self._artifact_location()
                return str(
                    self.client.create_experiment(name, artifact_location=place, tags={VIEW_TAG: _view(columns)})
                )
            shown = _columns_of(known.tags.get(VIEW_TAG, ""))
            missing = [column for column in columns if column not in shown]
            if known.lifecycle_stage == "active" and missing:
                self.client.set_experiment_tag(known.experiment_id, VIEW_TAG, _view([*shown, *missing]))
        if known.lifecycle_stage != "active":
            raise StoreError(
                f'the experiment "{name}" was deleted in MLflow; restore it: MLFLOW_TRACKING_URI={self._uri} '
                f"mlflow experiments restore --experiment-id {known.experiment_id}"
            )
        return str(known.experiment_id)

    def _artifact_location(self) -> str | None:
        """Files go to the store, unless a server or a folder of runs has its own place for them."""
        has_place = urlsplit(self._uri).scheme in ("http", "https", "file")
        return None if has_place else (self._store / "mlartifacts").as_uri()

    def runs_of(self, experiment: str, run: str) -> dict[Place, list[str]]:
        """Ids of the MLflow runs of a dflow run, by what they represent."""
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
        names = mlflow_names(params)
        listed = [Param(names[name], value[:PARAM_LENGTH]) for name, value in params.items()]
        for start in range(0, len(listed), PARAMS_IN_A_BATCH):
            self.client.log_batch(run_id, params=listed[start : start + PARAMS_IN_A_BATCH])

    def log_points(self, run_id: str, points: Sequence[Point], names: Iterable[str], *, some_exist: bool) -> None:
        """names: those of all points of the run, in an order that only grows. some_exist: an earlier call may have sent
        some of the points, so MLflow's are read first.
        """
        chosen = self._names(names)
        metrics = [metric for point in points for metric in _metrics(point, chosen)]
        if some_exist:
            known = {name: self._history(run_id, name) for name in {metric.key for metric in metrics}}
            metrics = [metric for metric in metrics if _identity(metric) not in known[metric.key]]
        self._log_metrics(run_id, metrics)

    def _log_metrics(self, run_id: str, metrics: Sequence[Metric]) -> None:
        for start in range(0, len(metrics), METRICS_IN_A_BATCH):
            batch = metrics[start : start + METRICS_IN_A_BATCH]
            try:
                self.client.log_batch(run_id, metrics=batch)
            except mlflow.exceptions.MlflowException as error:
                if error.error_code != REFUSED_VALUE:
                    raise
                self._log_each(run_id, batch)
        self.sent["points"] += len(metrics)

    def _log_each(self, run_id: str, metrics: Sequence[Metric]) -> None:
        """Send a batch that was refused metric by metric: one that MLflow does not take costs no other."""
        for name in dict.fromkeys(metric.key for metric in metrics):
            try:
                self.client.log_batch(run_id, metrics=[metric for metric in metrics if metric.key == name])
            except mlflow.exceptions.MlflowException as error:
                if error.error_code != REFUSED_VALUE:
                    raise
                self._say_once(
                    f'MLflow refused the metric "{shortened(name)}", all others are sent: {shown_error(error)}'
                )

    def _names(self, names: Iterable[str]) -> dict[str, str]:
        """The names of a run's metrics in MLflow; says which of them cannot be guessed."""
        chosen = mlflow_names(names)
        for name, other in chosen.items():
            if other != _in_allowed_characters(name):
                self._say_once(f'the metric "{shortened(name)}" is "{shortened(other)}" in MLflow')
        return chosen

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _history(self, run_id: str, name: str) -> set[tuple[int, int, str]]:
        return {_identity(metric) for metric in self.client.get_metric_history(run_id, name)}

    def log_results(self, run_id: str, results: Iterable[tuple[float, Mapping[str, float]]]) -> None:
        """Send (time, values) without a history, at step 0, except for values that MLflow already has as the latest."""
        given = list(results)
        names = self._names(name for _, values in given for name in values)
        metrics = [metric for when, values in given for metric in _metrics(Point(when, 0, values), names)]
        latest = self.client.get_run(run_id).data.metrics if metrics else {}
        self._log_metrics(run_id, [metric for metric in metrics if not _is_latest(metric, latest)])

    def log_model_results(
        self, run_id: str, model_id: str, results: Sequence[tuple[float, Mapping[str, float]]]
    ) -> None:
        """As log_results, linked to a model, except for values that the model already has from this run."""
        known = self.client.get_logged_model(model_id).metrics or []
        latest = {metric.key: metric.value for metric in known if metric.run_id == run_id}
        names = self._names(name for _, values in results for name in values)
        metrics = [
            Metric(metric.key, metric.value, metric.timestamp, 0, model_id=model_id)
            for when, values in results
            for metric in _metrics(Point(when, 0, values), names)
            if not _is_latest(metric, latest)
        ]
        self._log_metrics(run_id, metrics)

    def logged_model(self, experiment: str, name: str, digest: str, model: LoggedModel, files: ModelFiles) -> str:
        """The id of the model with that digest, created where the experiment has none.

        Completes a model whose creation was interrupted.
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
            with _linked(files.small) as folder:
                write_json(folder / "MLmodel", mlmodel(entry.model_id, model))
                write_json(folder / "references.json", unstructure(files.large))
                self.client.log_model_artifacts(entry.model_id, str(folder))
            self.client.finalize_logged_model(entry.model_id, "READY")
        return str(entry.model_id)

    def tag_model(self, model_id: str, tags: Mapping[str, str]) -> None:
        if tags:
            self.client.set_logged_model_tags(model_id, _cut(tags))

    def log_output(self, run_id: str, model_id: str) -> None:
        """Link a model to a run, as its output or as one that it evaluates."""
        outputs = self.client.get_run(run_id).outputs
        linked = {output.model_id for output in outputs.model_outputs} if outputs is not None else set()
        if model_id not in linked:
            self.client.log_outputs(run_id, [LoggedModelOutput(model_id, 0)])

    def log_note(self, run_id: str, note: str, known: Sequence[str]) -> None:
        """Set the run's description, unless a user wrote one that is not in `known`."""
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

    def log_files(self, run_id: str, files: Mapping[str, Path], references: Mapping[str, Reference]) -> None:
        """Send all files in one call, by their names in MLflow.

        What is missing is skipped, and what is no plain file of the store: a record of strangers may name any file.
        """
        existing = {
            name: path for name, path in files.items() if is_plain(path, self._store) and ".." not in Path(name).parts
        }
        if not (existing or references):
            return
        with _linked(existing) as folder:
            if references:
                write_json(folder / "references.json", unstructure(references))
            place = self._places.get(run_id)
            if place is None:
                self.client.log_artifacts(run_id, str(folder))
            else:  # the client would first fetch the run to find its place
                get_artifact_repository(place, tracking_uri=self._uri).log_artifacts(str(folder))
        self.sent["files"] += len(existing)


@contextmanager
def _linked(files: Mapping[str, Path]) -> Iterator[Path]:
    """A temporary folder with links of these names to these files."""
    with tempfile.TemporaryDirectory() as folder:
        for name, path in files.items():
            link = Path(folder, name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.absolute())
        yield Path(folder)


def _view(columns: Sequence[str]) -> str:
    return json.dumps({"selectedColumns": columns})


def _columns_of(view: str) -> list[str]:
    """The columns of a view; none of one that is not of this form."""
    with suppress(ValueError):
        match json.loads(view):
            case {"selectedColumns": [*columns]}:
                return [column for column in columns if isinstance(column, str)]
    return []


def _place(tags: Mapping[str, str]) -> Place:
    """What an MLflow run represents."""
    for kind in ("node", "combination"):
        if f"dflow.{kind}" in tags:
            return kind, tags[f"dflow.{kind}"]
    return WHOLE


def tracking_uri(store: Path, uri: str | None, root: Path) -> str:
    """The tracking URI, default: SQLite in the store. Relative paths start at `root`; secrets are resolved."""
    scheme, _, rest = resolved_text(uri or f"sqlite:///{store / 'mlflow.db'}").rpartition(":")
    if scheme == "":
        return (root / rest).as_uri()
    return f"sqlite:///{root / rest[3:]}" if scheme == "sqlite" else f"{scheme}:{rest}"


def check_trusted(uri: str, run: str) -> None:
    """Raises StoreError for the URI of a record that no pipeline file of the user names: it would get the credentials
    that MLflow finds in the environment, and the values of its secrets.
    """
    if uri and not is_trusted(TRACKING_URI, uri):
        secrets = f", with the value of {', '.join(secret_names(uri))}" if secret_names(uri) else ""
        raise StoreError(
            f"the record sends to {without_credentials(uri)}{secrets}, which no pipeline file that you ran here names; "
            f"if it is yours, say `dflow sync {run} --trust`"
        )


def open_client(store: Path, uri: str) -> MlflowClient:
    """A connected client. A database is created or migrated under a lock, since concurrent ones would fail."""
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
    """Create it under another name: a first migration that was killed cannot be completed, and MLflow refuses it.

    All migrations of MLflow take seconds, so an empty database is kept in the user's cache and copied from there.
    """
    fresh = path.with_name(f".{path.name}.new")
    for leftover in (fresh, fresh.with_name(f"{fresh.name}-journal")):
        leftover.unlink(missing_ok=True)
    cache = user_cache("mlflow")
    kept = None if cache is None else cache / f"{mlflow.__version__}.db"
    if kept is None or not kept.exists():
        _migrate(fresh)
        if kept is not None:
            with suppress(StoreError):  # a full disk
                replace_file(kept, fresh.read_bytes(), durable=True)
    else:
        shutil.copyfile(kept, fresh)
    with closing(sqlite3.connect(fresh)) as database, database:
        now, place = _milliseconds(time.time()), (path.parent / "mlartifacts" / "0").absolute().as_uri()
        values = (place, now, now)
        database.execute("UPDATE experiments SET artifact_location=?, creation_time=?, last_update_time=?", values)
    sync(fresh)
    fresh.rename(path)


def _migrate(fresh: Path) -> None:
    """An empty database of MLflow's."""
    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "connect", _without_waiting)
    try:
        MlflowClient(tracking_uri=f"sqlite:///{fresh}").search_experiments(max_results=1)
    finally:
        sqlalchemy.event.remove(sqlalchemy.engine.Engine, "connect", _without_waiting)


def _without_waiting(connection: Any, _record: Any) -> None:
    """No fsync per change: the new database is used only once it is complete."""
    connection.execute("PRAGMA synchronous = OFF")


def _file_of(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path)[1:])


@contextmanager
def _locked(store: Path, uri: str) -> Iterator[None]:
    """A lock for creating things that several processes may create at once; beside the database, which stores share."""
    folder = _file_of(uri).parent if uri.startswith("sqlite:") else store
    with os.fdopen(open_own(folder / "mlflow.lock", os.O_WRONLY | os.O_CREAT), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_transient(error: BaseException) -> bool:
    """Whether only the connection or the server failed; else MLflow refused the data."""
    return getattr(error, "error_code", TRANSIENT[0]) in TRANSIENT


def _metrics(point: Point, names: Mapping[str, str]) -> list[Metric]:
    stamp = _milliseconds(point.time)
    return [Metric(names[name], value, stamp, point.step) for name, value in point.metrics.items()]


def _identity(metric: Metric) -> tuple[int, int, str]:
    """Step, time and value as any MLflow store returns them: NaN equals itself, infinity is the largest number."""
    largest = sys.float_info.max
    value = metric.value if math.isnan(metric.value) else min(max(float(metric.value), -largest), largest)
    return metric.step, metric.timestamp, repr(value)


def _is_latest(metric: Metric, latest: Mapping[str, float]) -> bool:
    if metric.key not in latest:
        return False
    sent = Metric(metric.key, latest[metric.key], metric.timestamp, metric.step)
    return _identity(sent) == _identity(metric)


def mlflow_names(names: Iterable[str]) -> dict[str, str]:
    """Names that MLflow accepts, each another one: the first of those that would be the same has the name itself, the
    next ones have their number behind it.
    """
    chosen: dict[str, str] = {}
    taken: set[str] = set()
    for name in dict.fromkeys(names):
        wanted = other = _name(name)
        number = 1
        while other in taken:
            number += 1
            other = f"{wanted[: NAME_LENGTH - len(f'_{number}')]}_{number}"
        taken.add(other)
        chosen[name] = other
    return chosen


def _name(name: str) -> str:
    """The name as MLflow accepts it: acc@1 becomes acc_1, and a path stays below where it starts: ../x becomes __/x."""
    parts = ["__" if part == ".." else part for part in _in_allowed_characters(name).split("/") if part != "."]
    joined = "/".join(part for part in parts if part) or "_"
    return f"__{joined[2:]}" if joined.startswith("..") else joined


def _in_allowed_characters(name: str) -> str:
    """As posixpath.normpath has it, which MLflow requires of a name."""
    return posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", name)[:NAME_LENGTH]).lstrip("/")


def _cut(tags: Mapping[str, str]) -> dict[str, str]:
    return {name: value[:TAG_LENGTH] for name, value in tags.items()}


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def shown_error(error: BaseException) -> str:
    """The first line without passwords and queries; for an unreachable server its address and the reason."""
    lines: list[Any] = str(error).splitlines() or [type(error).__name__]
    line = without_credentials(str(lines[0]))
    where, why = AWAY.search(line), BROKEN.search(line) or REFUSED.search(line)
    if where and why:
        return f"{where[1] or where[3]}:{where[2] or where[4]}: {why[1].strip()}"
    if len(line) <= SHOWN_ERROR:
        return line
    words = line[:SHOWN_ERROR].rpartition(" ")[0] or line[:SHOWN_ERROR]
    return f"{words} ..."
