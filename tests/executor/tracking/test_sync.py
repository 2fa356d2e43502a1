"""`dflow sync` after a run, and servers that do not do what a server should."""

import contextlib
import http.server
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from report_page import Page
from toy_ops import ONE_NODE, PROJECT, Toy
from tracked_toy import fresh_database, tracked_toy

from dsl.errors import StoreError, shortened
from dsl.files import append_line, read_json_or_none, read_lines
from executor.commands import sync
from executor.maintenance.gc import kept_runs
from executor.records.run_record import Record
from executor.system.trust import trust_store
from executor.tracking.mlflow_client import open_client, tracking_uri
from executor.tracking.sync_state import lacks, send_rest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def unsent(tmp_path_factory):
    """A store with a run that nothing was sent of."""
    toy = tracked_toy(tmp_path_factory.mktemp("unsent"), tracked=False)
    assert toy.dflow("run", str(toy.file), "-s", "d.steps=30").returncode == 0
    return toy


def stored_in(unsent, folder, uri=None):
    """A copy of the store, whose run is tracked at another place."""
    store = folder / "runs"
    shutil.copytree(unsent.store, store)
    record = Record.load(next((store / "records").iterdir()))
    record.state.tracking_uri = uri
    record.save()
    trust_store(store)
    return store, record


def points_of(record, node="d"):
    events = [event for event in read_lines(record.events_path) if (event["node"], event["kind"]) == (node, "metric")]
    return [(event["step"], event["metrics"]["steps/loss"], int(event["time"] * 1000)) for event in events]


def as_after_a_kill(client, record):
    """The points of node d have arrived, and its run was not closed."""
    sent = read_json_or_none(record.folder / "mlflow.json")
    client.update_run(sent["nodes"]["d"]["run_id"], status="RUNNING")
    (record.folder / "mlflow.json").write_text(json.dumps({**sent, "events": None}))


def history(client, record, node="d", name="steps/loss"):
    child = read_json_or_none(record.folder / "mlflow.json")["nodes"][node]["run_id"]
    return [(point.step, point.value, point.timestamp) for point in client.get_metric_history(child, name)]


class Answering:
    """A server that gives the same answer to everything."""

    def __init__(self, status, body):
        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self):
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = do_PATCH = answer

            def log_message(self, *arguments):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (500, b"<html>oh</html>", "MLflow cannot be reached (API request to http://127.0.0.1"),
        (429, b"", "MLflow cannot be reached (API request to http://127.0.0.1"),
        (403, b'{"error_code": "PERMISSION_DENIED", "message": "no"}', "MLflow refused a part of the run ("),
        (200, b"<html>another server</html>", "MLflow cannot be reached (API request to endpoint"),
        (200, b'{"something": "else"}', "MLflow"),
        (200, b'{"experiments": 3}', "MLflow cannot be reached ("),
    ],
)
def test_a_server_that_gives_no_proper_answer_is_a_warning(unsent, tmp_path, status, body, said):
    with closing(Answering(status, body)) as server:
        store, record = stored_in(unsent, tmp_path, server.uri)
        warning, _ = send_rest(store, record.folder)
    assert warning.startswith(said)
    assert warning.endswith(f"dflow sync {record.run}`")
    assert "\n" not in warning
    assert lacks(record)


def test_a_server_that_never_answers_does_not_keep_a_run(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        toy = Toy(tmp_path, ONE_NODE + f'\n[mlflow]\ntracking_uri = "{uri}"\n', tracked=True)
        result = toy.dflow("run", str(toy.file), MLFLOW_HTTP_REQUEST_TIMEOUT="1")
    run = toy.state()["run"]
    assert result.returncode == 0
    where = uri.removeprefix("http://")
    kept = f"nothing is lost: send it later with `dflow sync {run}`"
    assert result.stderr == f"warning: MLflow cannot be reached ({where}: Read timed out); {kept}\n"
    lacks = f"MLflow lacks a part of this run; send it with: dflow sync {run}"
    assert result.stdout.endswith(f"MLflow cannot be reached ({where}: Read timed out); {lacks}\n")


@pytest.mark.parametrize(
    ("uri", "said"), [("htp://nowhere", "htp://nowhere"), ("http://127.0.0.1:9", "cannot be reached")]
)
def test_a_place_that_is_none_and_one_where_nobody_listens_are_warnings(unsent, tmp_path, uri, said):
    store, record = stored_in(unsent, tmp_path, uri)
    warning, _ = send_rest(store, record.folder)
    assert said in warning
    assert lacks(record)


@pytest.mark.parametrize("form", ["{folder}/mine.db", "beside.db", "file", "folder"])
def test_databases_and_folders_are_places_too_and_relative_ones_lie_beside_the_pipeline(
    unsent, tmp_path, form, monkeypatch
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    uris = {"file": (tmp_path / "a folder é").as_uri(), "folder": "mlruns"}
    uri = uris.get(form, "sqlite:///" + form.format(folder=tmp_path))
    store, record = stored_in(unsent, tmp_path, uri)
    place = tracking_uri(store, uri, tmp_path)
    for _ in range(2):
        assert send_rest(store, record.folder)[0] is None
        as_after_a_kill(open_client(store, place), record)
    assert send_rest(store, record.folder)[0] is None
    found = sorted(history(open_client(store, place), record))
    if form in ("file", "folder"):  # which take a point that they have again
        found = sorted(set(found))
    assert points_of(record) == found
    made = {"{folder}/mine.db": tmp_path / "mine.db", "beside.db": tmp_path / "beside.db"}
    made |= {"file": tmp_path / "a folder é", "folder": tmp_path / "mlruns"}
    assert made[form].exists()
    assert (store / "mlartifacts").exists() == (form not in ("file", "folder"))
    assert list(Path.cwd().iterdir()) == []  # where MLflow puts files by itself: the working directory


def test_a_place_that_was_away_gets_all_once_it_is_there(unsent, tmp_path, capsys):
    place = tmp_path / "away"
    place.write_text("no folder")
    store, record = stored_in(unsent, tmp_path, f"sqlite:///{place}/mlflow.db")
    warning, _ = send_rest(store, record.folder)
    assert warning.startswith("MLflow cannot be reached (")
    assert warning.endswith(f"nothing is lost: send it later with `dflow sync {record.run}`")
    place.unlink()
    place.mkdir()
    (place / "mlflow.db").write_bytes(fresh_database())
    assert synced(["--store", str(store)]) == 0
    assert f"run {record.run}: sent 5 runs, 34 points" in capsys.readouterr().out
    assert history(open_client(store, f"sqlite:///{place}/mlflow.db"), record) == points_of(record)


def test_sync_sends_every_run_that_lacks_something_and_says_what(unsent, tmp_path, capsys):
    store, record = stored_in(unsent, tmp_path)
    arguments = ["--store", str(store)]
    assert synced(arguments) == 0
    parent = read_json_or_none(record.folder / "mlflow.json")["parent"]
    said = f"MLflow holds all of it (run {parent})\n"
    assert capsys.readouterr().out == f"run {record.run}: sent 5 runs, 34 points, 15 files; {said}"
    assert synced(arguments) == 0
    assert (
        capsys.readouterr().out == f"{store}: nothing to send to MLflow; "
        "`dflow sync --all` also checks for what MLflow has lost\n"
    )
    assert synced([record.run, *arguments]) == 0
    assert capsys.readouterr().out == f"run {record.run}: {said}"


def test_sync_all_sends_what_mlflow_has_lost(unsent, tmp_path, capsys):
    store, record = stored_in(unsent, tmp_path)
    assert synced(["--store", str(store)]) == 0
    client = open_client(store, tracking_uri(store, None, store))
    with closing(sqlite3.connect(store / "mlflow.db")) as database, database:
        for table in ("latest_metrics", "metrics", "params", "tags", "runs"):
            database.execute(f"DELETE FROM {table}")
    assert synced(["--store", str(store)]) == 0
    assert "nothing to send to MLflow" in capsys.readouterr().out
    assert synced(["--all", "--store", str(store)]) == 0
    assert "sent 5 runs, 34 points" in capsys.readouterr().out
    assert history(client, record) == points_of(record)


def test_a_run_at_work_is_not_sent_by_another_process(unsent, tmp_path, capsys):
    store, record = stored_in(unsent, tmp_path)
    record.lock()
    with pytest.raises(StoreError) as caught:
        synced([record.run, "--store", str(store)])
    record.unlock()
    assert str(caught.value) == f"run {record.run} is still running; wait for it, or stop it first"


def test_a_killed_run_is_a_killed_run_while_and_after_it_is_sent(unsent, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store, record = stored_in(unsent, tmp_path)
    record.state.status = "running"
    record.save()
    assert synced([record.run, "--store", str(store)]) == 0
    page = Page.read(record.folder / "report.html")
    assert "killed" == dict(row[:2] for row in page.tables["runs"][0])["status"]
    assert f"the run was killed; resume with: dflow resume {record.run}" in page.text("runs")


def test_a_run_that_is_being_sent_is_not_running_and_nobody_takes_it(unsent, tmp_path):
    _, record = stored_in(unsent, tmp_path)
    record.state.status = "running"
    record.save()
    record.lock(to_send=True)
    other = Record.load(record.folder)
    assert ("killed", True) == (other.status(), other.is_locked())
    [kept] = kept_runs([other], 0)
    assert kept.running, "gc takes nothing of it"
    with pytest.raises(StoreError, match="is being sent to MLflow by `dflow sync`; wait for that"):
        other.lock()
    other.lock(to_send=True)
    other.unlock()
    record.unlock()
    assert not other.is_locked()
    other.lock()
    assert ("running", True) == (record.status(), record.is_locked())
    other.unlock()


def synced(arguments):
    """Run `dflow sync` in the folder of the store, the last argument; printed commands need not name it there."""
    parser = sync.argparse.ArgumentParser()
    sync.add_arguments(parser)
    with contextlib.chdir(Path(arguments[-1]).parent):
        return sync.main(parser.parse_args(arguments))


def test_a_deleted_experiment_and_a_deleted_run_are_said_with_what_to_do(unsent, tmp_path):
    store, record = stored_in(unsent, tmp_path)
    client = open_client(store, tracking_uri(store, None, store))
    experiment = client.create_experiment("toy", artifact_location=(store / "mlartifacts").as_uri())
    client.delete_experiment(experiment)
    warning, _ = send_rest(store, record.folder)
    assert 'the experiment "toy" was deleted in MLflow; restore it: MLFLOW_TRACKING_URI=sqlite:///' in warning
    assert f"mlflow experiments restore --experiment-id {experiment}" in warning
    client.restore_experiment(experiment)
    assert send_rest(store, record.folder)[0] is None
    parent = read_json_or_none(record.folder / "mlflow.json")["parent"]
    client.delete_run(parent)
    append_line(record.events_path, {"time": 1.0, "node": "d", "kind": "warning", "message": "more"})
    warning, _ = send_rest(store, record.folder)
    assert f"its run {parent} was deleted in MLflow; restore it there" in warning


def test_names_that_mlflow_does_not_take_and_values_that_are_no_numbers_lose_nothing(unsent, tmp_path):
    store, record = stored_in(unsent, tmp_path)
    values = {"acc@1": 0.5, "a//b": 1.0, "steps/nan": float("nan"), "steps/inf": float("inf")}
    for step in (100, 101):
        append_line(
            record.events_path,
            {"time": 1.0, "node": "d", "attempt": 1, "kind": "metric", "step": step, "metrics": values},
        )
    assert send_rest(store, record.folder)[0] is None
    client = open_client(store, tracking_uri(store, None, store))
    as_after_a_kill(client, record)
    assert send_rest(store, record.folder)[0] is None
    for name in ("acc_1", "a/b", "steps/nan", "steps/inf"):
        assert [step for step, *_ in history(client, record, name=name)] == [100, 101]


def logged(record, step, metrics):
    append_line(
        record.events_path,
        {"time": 1.0, "node": "d", "attempt": 1, "kind": "metric", "step": step, "metrics": metrics},
    )


def test_names_that_are_no_path_below_the_run_become_harmless_and_names_that_would_be_one_stay_apart(unsent, tmp_path):
    store, record = stored_in(unsent, tmp_path)
    sent_as = {
        ".": "_", "..": "__", "../x": "__/x", "...": "__.", "/": "__2", "go/./x": "go/x", "go/p@1": "go/p_1",
        "go/p#1": "go/p_1_2", "x" * 250 + "@": "x" * 250, "x" * 250 + "#": "x" * 248 + "_2",
    }  # fmt: skip
    logged(record, 100, {name: float(place) for place, name in enumerate(sent_as)})
    said = []
    assert send_rest(store, record.folder, said.append)[0] is None
    client = open_client(store, tracking_uri(store, None, store))
    points = {
        name: [(step, value) for step, value, _ in history(client, record, name=name)] for name in sent_as.values()
    }
    assert {name: [(100, float(place))] for place, name in enumerate(sent_as.values())} == points
    assert "FINISHED" == client.get_run(read_json_or_none(record.folder / "mlflow.json")["parent"]).info.status
    changed = [name for name in sent_as if name in (".", "..", "../x", "...", "/", "go/p#1", "x" * 250 + "#")]
    assert [f'the metric "{shortened(name)}" is "{shortened(sent_as[name])}" in MLflow' for name in changed] == said
    logged(record, 101, {"go/p#1": 7.0})
    as_after_a_kill(client, record)
    assert send_rest(store, record.folder)[0] is None  # another process: the names stay as they are
    assert [100, 101] == [step for step, *_ in history(client, record, name="go/p_1_2")]


def test_a_metric_that_mlflow_refuses_costs_only_itself(unsent, tmp_path, monkeypatch):
    store, record = stored_in(unsent, tmp_path)
    logged(record, 100, {"go/fine": 1.0, "go/refused": 2.0})
    opened = open_client(store, tracking_uri(store, None, store))

    class Strict:
        """A server that has rules of its own."""

        def __getattr__(self, name):
            return getattr(opened, name)

        def log_batch(self, run_id, metrics=(), **other):
            if any(metric.key == "go/refused" for metric in metrics):
                raise MlflowException("Invalid value for go/refused", INVALID_PARAMETER_VALUE)
            opened.log_batch(run_id, metrics=metrics, **other)

    monkeypatch.setattr("executor.tracking.mlflow_client.open_client", lambda *a: Strict())
    said = []
    assert send_rest(store, record.folder, said.append)[0] is None
    assert ['MLflow refused the metric "go/refused", all others are sent: Invalid value for go/refused'] == said
    assert [100] == [step for step, *_ in history(opened, record, name="go/fine")]
    assert "FINISHED" == opened.get_run(read_json_or_none(record.folder / "mlflow.json")["parent"]).info.status
    assert not lacks(Record.load(record.folder))


def test_a_database_that_another_process_is_writing_to_is_tried_again(unsent, tmp_path, monkeypatch):
    store, record = stored_in(unsent, tmp_path)
    assert send_rest(store, record.folder)[0] is None
    append_line(
        record.events_path,
        {"time": 1.0, "node": "d", "attempt": 1, "kind": "metric", "step": 100, "metrics": {"steps/loss": 0.0}},
    )
    as_after_a_kill(open_client(store, tracking_uri(store, None, store)), record)
    answers = [MlflowException("(sqlite3.OperationalError) database is locked")] * 2
    monkeypatch.setattr("executor.tracking.replay.time.sleep", lambda seconds: None)
    opened = open_client(store, tracking_uri(store, None, store))

    class Busy:
        def __getattr__(self, name):
            if answers and name == "log_batch":
                raise answers.pop()
            return getattr(opened, name)

    monkeypatch.setattr("executor.tracking.mlflow_client.open_client", lambda *a: Busy())
    assert send_rest(store, record.folder)[0] is None
    assert answers == []
    assert sorted(history(opened, record))[-1] == (100, 0.0, 1000)


KILLED_AT_RANDOM = """
import os, random, signal, sys
from pathlib import Path
import executor.tracking.replay
from executor.tracking.sync_state import lacks, send_rest
from executor.records.run_record import Record

store, folder = Path(sys.argv[1]), Path(sys.argv[2])
draw = random.Random(7)
executor.tracking.replay.POINTS_AT_ONCE = 50
kills = 0
while lacks(Record.load(folder)):
    child = os.fork()
    moment = draw.uniform(0.05, 0.5 + kills / 10)
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, moment)  # of CPU time; its signal ends a process as SIGKILL does
        os._exit(send_rest(store, folder)[0] is not None)
    kills += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert kills < 200
print(kills)
"""


@pytest.mark.parametrize("last", [600, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_sync_that_is_killed_at_any_moment_sends_everything_once(unsent, tmp_path, last):
    """The second part of an undisturbed run is not told from that of one whose sync was killed again and again."""
    store, record = stored_in(unsent, tmp_path)
    for step in range(30, last):
        line = {"time": 1.0 + step, "node": "d", "attempt": 1, "kind": "metric", "step": step}
        append_line(record.events_path, {**line, "metrics": {"steps/loss": 1 / (step + 1)}})
    command = [sys.executable, "-W", "ignore", "-c", KILLED_AT_RANDOM, str(store), str(record.folder)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "MLFLOW_DISABLE_TELEMETRY": "true"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    assert int(found.stdout) > 3
    client = open_client(store, tracking_uri(store, None, store))
    runs = client.search_runs(["1"])
    assert sorted(run.data.tags.get("dflow.node", "") for run in runs) == ["", "a", "b", "c", "d"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert sorted(points_of(record)) == sorted(history(client, record))
