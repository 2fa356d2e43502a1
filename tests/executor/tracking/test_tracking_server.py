"""A real MLflow server that is killed in the middle of a run, and comes back."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from mlflow.tracking import MlflowClient
from ports import free_port
from toy_ops import PIPELINE, Toy, wait_for

from dsl.files import read_json_or_none, read_lines
from executor.records.run_record import Record
from executor.tracking.sync_state import lacks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Server:
    """`mlflow server` on a database and a folder of its own; killed as by a machine that dies."""

    def __init__(self, folder):
        self._folder = folder
        self._process = None
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self):
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--backend-store-uri",
            f"sqlite:///{self._folder}/server.db",
        ]
        command += ["--artifacts-destination", str(self._folder / "artifacts"), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--workers", "1"]
        quiet = {
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }
        with (self._folder / "server.log").open("a") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, **quiet}, stdout=log, stderr=log, start_new_session=True
            )
        wait_for(self.is_ready)

    def is_ready(self):
        assert self._process.poll() is None, (self._folder / "server.log").read_text()
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
            return False

    def kill(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


def tracked_by(server, folder):
    text = f'\n[mlflow]\nexperiment = "real server"\ntracking_uri = "{server.uri}"\nnotes = "# Tried\\nwhat happens"\n'
    return Toy(folder, PIPELINE + text + 'tags = { team = "x", "cost centre" = "7" }\n', tracked=True)


def begun(toy, client):
    """Run the toy in the background until the server has points of it; also the child's id."""
    process = toy.start("run", str(toy.file), "-s", "d.steps=100000", "-s", "d.seconds=0.02")
    wait_for(lambda: child_of(toy) is not None)
    wait_for(lambda: client.get_metric_history(child_of(toy), "steps/loss"))
    return process


def record_of(toy):
    return Record.load(toy.store / "records" / toy.state()["run"])


def child_of(toy):
    if not toy.has_begun():
        return None
    sent = read_json_or_none(record_of(toy).folder / "mlflow.json") or {"nodes": {}}
    return sent["nodes"].get("d", {}).get("run_id")


def points(toy):
    events = [
        event for event in read_lines(record_of(toy).events_path) if (event["node"], event["kind"]) == ("d", "metric")
    ]
    return [(event["step"], event["metrics"]["steps/loss"], int(event["time"] * 1000)) for event in events]


def held(client, run_id):
    return [(point.step, point.value, point.timestamp) for point in client.get_metric_history(run_id, "steps/loss")]


def is_whole(client, toy, child):
    """Whether all of the run is in MLflow, each point once and no run twice."""
    record = record_of(toy)
    experiment = client.get_experiment_by_name("real server").experiment_id
    runs = client.search_runs([experiment], f"tags.`dflow.run` = '{record.run}'")
    assert sorted(run.data.tags.get("dflow.node", "") for run in runs) == ["", "a", "b", "c", "d"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert child == child_of(toy)
    assert held(client, child) == points(toy)
    assert not lacks(record)


def killed_for_long_enough(server, toy):
    """Until the run has 50 more points than the server saw of it at most."""
    server.kill()
    before = len(points(toy))
    wait_for(lambda: len(points(toy)) > before + 50)
    return before


def test_a_run_goes_on_without_its_server_which_gets_all_once_it_is_there_again(server, tmp_path):
    """First it comes back in the middle of the run, and then only after it, when `dflow sync` sends the rest."""
    client = MlflowClient(server.uri)
    toy = tracked_by(server, tmp_path)
    process = begun(toy, client)
    child = child_of(toy)
    before = killed_for_long_enough(server, toy)
    server.start()
    wait_for(lambda: len(held(client, child)) > before + 50)
    killed_for_long_enough(server, toy)
    (toy.folder / "end").touch()
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0
    run = record_of(toy).run
    warnings = errors.splitlines()
    assert 1 <= len(warnings) <= 2  # one where the server was away between two sends
    for warning in warnings:
        assert warning.startswith("warning: MLflow cannot be reached (127.0.0.1:")
        assert warning.endswith(f"nothing is lost: send it later with `dflow sync {run}`")
    assert out.count("MLflow can be reached again and has all of the run so far") == len(warnings) - 1
    assert f"MLflow lacks a part of this run; send it with: dflow sync {run}\n" in out
    assert lacks(record_of(toy))
    server.start()
    result = toy.dflow("sync")
    assert (result.returncode, result.stderr) == (0, f"run {run}: loading MLflow, and asking it what it holds\n")
    assert re.fullmatch(rf"run {run}: sent \d+ points, \d+ files; MLflow holds all of it \(run \w+\)\n", result.stdout)
    is_whole(client, toy, child)
    tags_and_notes_of_the_file_are_those_of_the_parent(client, toy)


def tags_and_notes_of_the_file_are_those_of_the_parent(client, toy):
    sent = read_json_or_none(record_of(toy).folder / "mlflow.json")
    tags = client.get_run(sent["parent"]).data.tags
    assert {name: tags[name] for name in ("team", "cost centre", "dflow.pipeline")} == {
        "team": "x", "cost centre": "7", "dflow.pipeline": "toy"
    }  # fmt: skip
    assert tags["mlflow.note.content"].startswith("# Tried\nwhat happens\n\n**done** after ")
    assert client.get_run(child_of(toy)).data.tags["mlflow.parentRunId"] == sent["parent"]
    assert sorted(entry.path for entry in client.list_artifacts(child_of(toy))) == [
        "artifact",
        "d.log",
        "manifest.json",
    ]
