"""dflow's client of MLflow; the only module that imports mlflow.

Every call is idempotent, so the caller may be killed at any point.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import posixpath
import re
import shutil
import sqlite3
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
from attrs import define, field
from google.protobuf.json_format import ParseError
from mlflow.entities import DatasetInput, InputTag, LoggedModelOutput, Metric, Param, RunTag
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking import MlflowClient

from dsl.convert import unstructure
from dsl.errors import StoreError, shortened
from dsl.files import open_own, replace_file, sync, write_json
from dsl.secrets import resolved_text, without_credentials
from executor.records.events import Point
from executor.system.symlinks import is_plain
from executor.system.user_cache import user_cache
from executor.tracking.contents import (
    NAME_LENGTH,
    NOTE,
    WHOLE,
    Dataset,
    Measured,
    ModelFiles,
    Place,
    Reference,
    mlmodel,
    model_name,
)
from executor.tracking.sync_state import VIEW
from ops.lib.logged_model import LoggedModel

PARAM_LENGTH = 6000
TAG_LENGTH = 5000
DIGEST_LENGTH = 36  # of a dataset
FOUND_AT_ONCE = 1000
LOCK_TIMEOUT_S = 60
# A view of the table of runs, as the button "Share" of MLflow's page stores one. By default it shows no metric.
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
VIEW_COLUMNS = ("attributes.`Created`", "attributes.`Duration`", "attributes.`User`")
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


@define
class HeldRun:
    """A run as MLflow has it. files_at: the place of its files."""

    run_id: str
    files_at: str
    status: str = "RUNNING"
    tags: dict[str, str] = field(factory=dict)
    params: dict[str, str] = field(factory=dict)


class Tracker:
    """A connection to the MLflow server or database of a store. sent: counts of runs, points and files.

    say: called once with each metric whose name had to be changed, or that was refused.
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

    def experiment(self, name: str, metrics: Iterable[str], params: Iterable[str] = ()) -> str:
        """The id of an MLflow experiment, created if missing. Raises StoreError where it was deleted.

        metrics, params: further columns for the table of runs in the view that `dflow ui` opens.
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
        """The place for MLflow's files: a folder of the store, or None where a server or folder of runs has its own."""
        has_place = urlsplit(self._uri).scheme in ("http", "https", "file")
        return None if has_place else (self._store / "mlartifacts").as_uri()

    def runs_of(self, experiment: str, run: str) -> dict[Place, list[HeldRun]]:
        """The MLflow runs that belong to a dflow run, by the part that each represents."""
        found: dict[Place, list[HeldRun]] = {}
        token = None
        while True:
            page = self.client.search_runs([experiment], f"tags.`dflow.run` = '{run}'", 1, FOUND_AT_ONCE, None, token)
            for entry in page:
                found.setdefault(_place(entry.data.tags), []).append(_held(entry))
            token = page.token
            if not token:
                return found

    def stage_of(self, run_id: str) -> str | None:
        """The state of an MLflow run, "active" or "deleted"; None where it does not exist."""
        try:
            return str(self.client.get_run(run_id).info.lifecycle_stage)
        except mlflow.exceptions.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def create_run(self, experiment: str, started: float, tags: Mapping[str, str]) -> HeldRun:
        run = self.client.create_run(experiment, start_time=_milliseconds(started), tags=_cut(tags))
        self.sent["runs"] += 1
        return _held(run)

    def delete_run(self, run_id: str) -> None:
        if self.stage_of(run_id) == "active":
            self.client.delete_run(run_id)

    def run_again(self, held: HeldRun) -> None:
        if held.status != "RUNNING":
            self.client.update_run(held.run_id, status="RUNNING")
            held.status = "RUNNING"

    def close(self, held: HeldRun, status: str, ended: float) -> None:
        self.client.set_terminated(held.run_id, status=status, end_time=_milliseconds(ended))
        held.status = status

    def log_tags(self, held: HeldRun, tags: Mapping[str, str]) -> None:
        """Set those tags of a run that have other values in MLflow."""
        new = {name: value for name, value in _cut(tags).items() if held.tags.get(name) != value}
        if new:
            self.client.log_batch(held.run_id, tags=[RunTag(name, value) for name, value in new.items()])
            held.tags |= new

    def delete_tag(self, held: HeldRun, name: str) -> None:
        if name in held.tags:
            self.client.delete_tag(held.run_id, name)
            del held.tags[name]

    def log_params(self, held: HeldRun, params: Mapping[str, str]) -> None:
        """Send the parameters that the run lacks in MLflow, which does not allow changed values."""
        names = mlflow_names(params)
        given = {names[name]: value[:PARAM_LENGTH] for name, value in params.items()}
        new = [Param(name, value) for name, value in given.items() if name not in held.params]
        self.client.log_batch(held.run_id, params=new)
        held.params |= given

    def log_points(self, run_id: str, points: Sequence[Point], names: Iterable[str]) -> None:
        """Send points to an MLflow run; a database ignores points that it already has.

        names: the metric names of all points of the run, in an order that only grows.
        """
        chosen = self._names(names)
        self._log_metrics(run_id, [metric for point in points for metric in _metrics(point, chosen)])

    def _log_metrics(self, run_id: str, metrics: Sequence[Metric]) -> None:
        """Send metrics in one call; if MLflow refuses one, send them again one by one, so that only that
        one is lost.
        """
        try:
            self.client.log_batch(run_id, metrics=metrics)
        except mlflow.exceptions.MlflowException as error:
            if error.error_code != REFUSED_VALUE:
                raise
            self._log_each(run_id, metrics)
        self.sent["points"] += len(metrics)

    def _log_each(self, run_id: str, metrics: Sequence[Metric]) -> None:
        for name in dict.fromkeys(metric.key for metric in metrics):
            try:
                self.client.log_batch(run_id, metrics=[metric for metric in metrics if metric.key == name])
            except mlflow.exceptions.MlflowException as error:
                if error.error_code != REFUSED_VALUE:
                    raise
                self.say_once(
                    f'MLflow refused the metric "{shortened(name)}", all others are sent: {shown_error(error)}'
                )

    def _names(self, names: Iterable[str]) -> dict[str, str]:
        """The names in MLflow of a run's metrics; the user is told of names that cannot be guessed."""
        chosen = mlflow_names(names)
        for name, other in chosen.items():
            if other != _in_allowed_characters(name):
                self.say_once(f'the metric "{shortened(name)}" is "{shortened(other)}" in MLflow')
        return chosen

    def say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def log_results(self, run_id: str, results: Sequence[Measured], model_id: str | None = None) -> None:
        """Send values that have no history, at step 0. model_id: a logged model to link them to."""
        names = self._names(name for _, values in results for name in values)
        metrics = [metric for when, values in results for metric in _metrics(Point(when, 0, values), names, model_id)]
        self._log_metrics(run_id, metrics)

    def ready_model(self, experiment: str, digest: str) -> str | None:
        """The id of the logged model with that digest; None where the experiment lacks it, or has it incompletely."""
        found = self.client.search_logged_models([experiment], f"tags.`dflow.digest` = '{digest}'", max_results=1)
        return str(found[0].model_id) if found and str(found[0].status) == "READY" else None

    def logged_model(self, experiment: str, name: str, digest: str, model: LoggedModel, files: ModelFiles) -> str:
        """The id of the logged model with that digest, created where the experiment has none.

        A model whose creation was interrupted is completed.
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
        """Link a logged model to an MLflow run, as the run's output or as a model that it evaluates."""
        outputs = self.client.get_run(run_id).outputs
        linked = {output.model_id for output in outputs.model_outputs} if outputs is not None else set()
        if model_id not in linked:
            self.client.log_outputs(run_id, [LoggedModelOutput(model_id, 0)])

    def log_note(self, held: HeldRun, note: str, known: Sequence[str]) -> None:
        """Set the MLflow run's description, unless a user changed it. known: the descriptions that dflow wrote."""
        held.tags[NOTE] = self.client.get_run(held.run_id).data.tags.get(NOTE, "")
        if held.tags[NOTE] in known:
            self.log_tags(held, {NOTE: note})

    def log_inputs(self, run_id: str, read: Iterable[Dataset]) -> None:
        inputs = []
        for each in read:
            source = json.dumps({"path": each.path, "digest": each.digest})
            dataset = mlflow.entities.Dataset(each.name[:NAME_LENGTH], each.digest[:DIGEST_LENGTH], "dflow", source)
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", each.context)]))
        if inputs:
            self.client.log_inputs(run_id, datasets=inputs)

    def tag_of(self, run_id: str, name: str) -> str:
        """The value of an MLflow run's tag; "" where the run or tag does not exist."""
        if self.stage_of(run_id) != "active":
            return ""
        return str(self.client.get_run(run_id).data.tags.get(name, ""))

    def files_of(self, held: HeldRun, folder: str) -> dict[str, int]:
        """The sizes of an MLflow run's files in a folder and below it, by name."""
        found: dict[str, int] = {}
        for entry in self.client.list_artifacts(held.run_id, folder):
            found |= self.files_of(held, entry.path) if entry.is_dir else {str(entry.path): int(entry.file_size or 0)}
        return found

    def log_files(self, held: HeldRun, files: Mapping[str, Path], references: Mapping[str, Reference]) -> None:
        """Send files to an MLflow run in one call, by their names there.

        Missing files are skipped, and so are all that are no regular files of the store: a stranger's record may name
        any file.
        """
        existing = {
            name: path for name, path in files.items() if is_plain(path, self._store) and ".." not in Path(name).parts
        }
        if not (existing or references):
            return
        with _linked(existing) as folder:
            if references:
                write_json(folder / "references.json", unstructure(references))
            # The client would first fetch the run to find its place.
            get_artifact_repository(held.files_at, tracking_uri=self._uri).log_artifacts(str(folder))
        self.sent["files"] += len(existing)


@contextmanager
def _linked(files: Mapping[str, Path]) -> Iterator[Path]:
    """Open a temporary folder with symbolic links to files, by these names."""
    with tempfile.TemporaryDirectory() as folder:
        for name, path in files.items():
            link = Path(folder, name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.absolute())
        yield Path(folder)


def _view(columns: Sequence[str]) -> str:
    return json.dumps({"selectedColumns": columns})


def _columns_of(view: str) -> list[str]:
    """The columns of an experiment's view; empty for a view of another form."""
    with suppress(ValueError):
        match json.loads(view):
            case {"selectedColumns": [*columns]}:
                return [column for column in columns if isinstance(column, str)]
    return []


def _held(run: mlflow.entities.Run) -> HeldRun:
    data = run.data
    return HeldRun(
        run_id=str(run.info.run_id),
        files_at=str(run.info.artifact_uri),
        status=str(run.info.status),
        tags=dict(data.tags),
        params=dict(data.params),
    )


def _place(tags: Mapping[str, str]) -> Place:
    """The part of a dflow run that an MLflow run represents, by its tags."""
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


def open_client(store: Path, uri: str) -> MlflowClient:
    """A connected MLflow client. Its database is created or migrated under a lock, as that cannot be done twice at
    once.
    """
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
    """Create an MLflow database under a temporary name, since MLflow refuses one whose migration was interrupted.

    MLflow's migrations take seconds, so an empty database is kept in the user's cache and copied from there.
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
    """Create an empty MLflow database in a file."""
    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "connect", _without_waiting)
    try:
        MlflowClient(tracking_uri=f"sqlite:///{fresh}").search_experiments(max_results=1)
    finally:
        sqlalchemy.event.remove(sqlalchemy.engine.Engine, "connect", _without_waiting)


def _without_waiting(connection: Any, _record: Any) -> None:
    """Switch off fsync for a new SQLite database; it is not used before it is complete."""
    connection.execute("PRAGMA synchronous = OFF")


def _file_of(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path)[1:])


@contextmanager
def _locked(store: Path, uri: str) -> Iterator[None]:
    """Open a context that holds a lock, so that only one process creates runs, experiments or databases.

    The lock file is beside the database, which several stores may share.
    """
    folder = _file_of(uri).parent if uri.startswith("sqlite:") else store
    with os.fdopen(open_own(folder / "mlflow.lock", os.O_WRONLY | os.O_CREAT), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_transient(error: BaseException) -> bool:
    """Whether an error concerns only connection or server; otherwise MLflow refused the data."""
    return getattr(error, "error_code", TRANSIENT[0]) in TRANSIENT


def _metrics(point: Point, names: Mapping[str, str], model_id: str | None = None) -> list[Metric]:
    stamp = _milliseconds(point.time)
    return [Metric(names[name], value, stamp, point.step, model_id=model_id) for name, value in point.metrics.items()]


def mlflow_names(names: Iterable[str]) -> dict[str, str]:
    """Names that MLflow accepts, by the given names, all different.

    If several would become equal, the first keeps the name and the others get a number at the end.
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
    """The name in a form that MLflow accepts: acc@1 becomes acc_1, and ../x becomes __/x, which stays in its folder."""
    parts = ["__" if part == ".." else part for part in _in_allowed_characters(name).split("/") if part != "."]
    joined = "/".join(part for part in parts if part) or "_"
    return f"__{joined[2:]}" if joined.startswith("..") else joined


def _in_allowed_characters(name: str) -> str:
    """The name with other characters replaced by "_", shortened, and normalised as posixpath.normpath does."""
    return posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", name)[:NAME_LENGTH]).lstrip("/")


def _cut(tags: Mapping[str, str]) -> dict[str, str]:
    return {name: value[:TAG_LENGTH] for name, value in tags.items()}


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def shown_error(error: BaseException) -> str:
    """The first line of an error without passwords and queries; for an unreachable server, its address and
    the reason.
    """
    lines: list[Any] = str(error).splitlines() or [type(error).__name__]
    line = without_credentials(str(lines[0]))
    where, why = AWAY.search(line), BROKEN.search(line) or REFUSED.search(line)
    if where and why:
        return f"{where[1] or where[3]}:{where[2] or where[4]}: {why[1].strip()}"
    if len(line) <= SHOWN_ERROR:
        return line
    words = line[:SHOWN_ERROR].rpartition(" ")[0] or line[:SHOWN_ERROR]
    return f"{words} ..."
