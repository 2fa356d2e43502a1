"""What MLflow holds of a run, and what happens when it cannot be reached."""

import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from unittest.mock import ANY

import attrs
import pytest
from mlflow.exceptions import MlflowException
from toy_ops import ONE_NODE, PROJECT, Toy, wait_for

from executor import follow
from executor.follow import lacks
from executor.jsonlines import append_line, read_json, read_lines, write_json
from executor.record import Record, find_record
from executor.sender import Sender
from executor.track import FILE_LIMIT, open_client, tracking_uri

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CALLED = '(stage.out_dir / "text.txt").write_text(joined)'


class Tracked:
    """A store in which the pipeline ran twice, the second time with another value for its last node."""

    def __init__(self, toy):
        self.toy = toy
        source = (toy.folder / "toy.py").read_text()
        large = CALLED + f'\n    (stage.out_dir / "large.bin").write_bytes(bytes({FILE_LIMIT} + 1))'
        (toy.folder / "toy.py").write_text(source.replace(CALLED, large))
        self.first = self.run()
        self.second = self.run("-s", "d.steps=7")

    def run(self, *overrides):
        result = self.toy.dflow("run", str(self.toy.file), *overrides)
        assert (result.returncode, result.stderr) == (0, "")
        return self.toy.store / "records" / self.toy.state()["run"]

    def ids(self, record):
        sent = read_json(record / "mlflow.json")
        return sent["parent"], {name: node["run_id"] for name, node in sent["nodes"].items()}

    @property
    def client(self):
        return open_client(self.toy.store, in_store(self.toy))


def in_store(toy):
    """The tracking URI of a store whose pipelines name none."""
    return tracking_uri(toy.store, None, toy.folder)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    return Tracked(Toy(tmp_path_factory.mktemp("tracked"), tracked=True))


def history(client, run_id, name):
    return [(point.step, point.value, point.timestamp) for point in client.get_metric_history(run_id, name)]


def artifacts(client, run_id, path=None):
    found = []
    for entry in client.list_artifacts(run_id, path):
        found += artifacts(client, run_id, entry.path) if entry.is_dir else [entry.path]
    return sorted(found)


def test_a_run_is_a_parent_with_a_child_for_every_node(tracked):
    parent, children = tracked.ids(tracked.first)
    run = tracked.client.get_run(parent)
    assert (run.info.status, run.info.run_name) == ("FINISHED", f"toy {tracked.first.name}")
    assert tracked.client.get_experiment(run.info.experiment_id).name == "toy"
    found = tracked.client.search_runs([run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent}'")
    assert {child.info.run_id: (child.info.run_name, child.info.status) for child in found} == {
        run_id: (name, "FINISHED") for name, run_id in children.items()
    }
    assert list(children) == ["a", "b", "c", "d"]


def test_the_tags_of_a_child_are_these(tracked):
    parent, children = tracked.ids(tracked.first)
    node = attrs.asdict(Record.load(tracked.first).state.nodes["c"])
    tags = tracked.client.get_run(children["c"]).data.tags
    assert {
        name: value for name, value in tags.items() if name.startswith("dflow.") or name == "mlflow.parentRunId"
    } == {
        "mlflow.parentRunId": parent,
        "dflow.run": tracked.first.name,
        "dflow.node": "c",
        "dflow.op": "join",
        "dflow.key": node["key"],
        "dflow.digest": node["digest"],
        "dflow.cache": "miss",
        "dflow.attempts": "1",
        "dflow.acceptance": "computed",
    }


def test_the_params_are_the_flat_config(tracked):
    parent, children = tracked.ids(tracked.first)
    expected = {
        "op": "join", "texts": "['@a', '@b']", "extra": "None", "between": "-", "weight": "1.0",
        "launch.kind": "process", "launch.nproc": "1", "launch.sp_degree": "1", "launch.device": "auto",
        "launch.threads": "0",
    }  # fmt: skip
    assert tracked.client.get_run(children["c"]).data.params == expected
    of_parent = tracked.client.get_run(parent).data.params
    assert {name: value for name, value in of_parent.items() if name.startswith("c.")} == {
        f"c.{name}": value for name, value in expected.items()
    }


def test_metrics_have_the_steps_and_times_of_the_events(tracked):
    parent, children = tracked.ids(tracked.first)
    lines = [json.loads(line) for line in (tracked.first / "events.jsonl").read_text().splitlines()]
    expected = [
        (line["step"], line["metrics"]["steps/loss"], int(line["time"] * 1000))
        for line in lines
        if line["node"] == "d" and line["kind"] == "metric"
    ]
    assert len(expected) == 5
    assert history(tracked.client, children["d"], "steps/loss") == expected
    assert tracked.client.get_run(parent).data.metrics == {"steps/loss": 0.2}


def test_artifacts_are_the_manifest_the_log_figures_and_small_files(tracked):
    _, children = tracked.ids(tracked.first)
    assert artifacts(tracked.client, children["c"]) == [
        "artifact/text.txt", "c.log", "figures/plot.png", "manifest.json", "references.json"
    ]  # fmt: skip
    folder = tracked.toy.store / "mlartifacts" / children["c"] / "artifacts"
    references = json.loads((folder / "references.json").read_text())
    digest = tracked.client.get_run(children["c"]).data.tags["dflow.digest"]
    assert references["large.bin"]["size"] == FILE_LIMIT + 1
    assert references["large.bin"]["path"] == str(tracked.toy.store / "objects" / digest / "large.bin")


def test_inputs_are_datasets(tracked):
    _, children = tracked.ids(tracked.first)
    nodes = attrs.asdict(Record.load(tracked.first).state)["nodes"]
    found = tracked.client.get_run(children["c"]).inputs.dataset_inputs
    assert sorted((entry.dataset.name, entry.dataset.digest, entry.tags[0].value) for entry in found) == [
        ("a", nodes["a"]["digest"][:36], "texts"),
        ("b", nodes["b"]["digest"][:36], "texts"),
    ]


def test_a_cached_node_has_a_child_that_names_the_run_that_made_it(tracked):
    _, children = tracked.ids(tracked.second)
    run = tracked.client.get_run(children["c"])
    assert (run.info.status, run.data.tags["dflow.cache"], run.data.tags["dflow.source_run"]) == (
        "FINISHED",
        "hit",
        tracked.first.name,
    )
    assert run.data.tags["dflow.source_mlflow_run"] == tracked.ids(tracked.first)[1]["c"]
    assert run.data.metrics == {"join/length": 11.0, "join/weight": 1.0}
    assert artifacts(tracked.client, children["c"]) == ["manifest.json"]


def test_a_run_in_which_nothing_ran_makes_none_and_names_the_one_with_the_results(tracked):
    before = len(tracked.client.search_runs(["1"]))
    result = tracked.toy.dflow("run", str(tracked.toy.file))
    assert f"results in MLflow run {tracked.ids(tracked.first)[0]}" in result.stdout
    assert len(tracked.client.search_runs(["1"])) == before
    shown = json.loads(tracked.toy.dflow("status", "--json").stdout)
    assert {row["id"]: row["mlflow_run_id"] for row in shown["nodes"]} == tracked.ids(tracked.first)[1]


def test_sending_twice_does_not_double(tracked):
    _, children = tracked.ids(tracked.second)
    before = history(tracked.client, children["d"], "steps/loss")
    sent = read_json(tracked.second / "mlflow.json")
    sent["nodes"]["d"]["points"] = 0
    sent["events"] = None
    write_json(tracked.second / "mlflow.json", sent)
    assert Sender(tracked.toy.store, tracked.second).send() is None
    assert history(tracked.client, children["d"], "steps/loss") == before
    assert tracked.ids(tracked.second)[1] == children


def test_points_that_a_resumed_attempt_did_again_are_there_once_in_the_same_child(tracked):
    _, children = tracked.ids(tracked.second)
    line = {"time": 1.0, "node": "d", "attempt": 2}
    append_line(tracked.second / "events.jsonl", {**line, "kind": "cut", "step": 2})
    for step in range(2, 9):
        point = {"kind": "metric", "step": step, "metrics": {"steps/loss": 1 / (step + 1)}}
        append_line(tracked.second / "events.jsonl", {**line, "time": float(step), **point})
    assert Sender(tracked.toy.store, tracked.second).send() is None
    assert tracked.ids(tracked.second)[1] == children
    found = history(tracked.client, children["d"], "steps/loss")
    assert sorted((step, value) for step, value, _ in found) == [(step, 1 / (step + 1)) for step in range(9)]
    assert tracked.client.get_run(children["d"]).info.status == "FINISHED"


def test_a_child_that_holds_points_of_other_code_is_made_anew(tracked):
    record = tracked.run("-s", "d.steps=4")
    _, children = tracked.ids(record)
    line = {"time": 1.0, "node": "d", "attempt": 2}
    append_line(
        record / "events.jsonl", {**line, "kind": "state", "state": "running", "cache": "resumed", "key": "new"}
    )
    append_line(record / "events.jsonl", {**line, "kind": "cut", "step": 2})
    append_line(record / "events.jsonl", {**line, "kind": "metric", "step": 2, "metrics": {"steps/loss": 9.0}})
    assert Sender(tracked.toy.store, record).send() is None
    again = tracked.ids(record)[1]["d"]
    found = history(tracked.client, again, "steps/loss")
    assert sorted((step, value) for step, value, _ in found) == [(0, 1.0), (1, 0.5), (2, 9.0)]
    assert tracked.client.get_run(children["d"]).info.lifecycle_stage == "deleted"
    assert tracked.client.get_run(again).info.status == "FINISHED"


class Killed(BaseException):
    """Like kill -9: nobody answers it."""


class Failing:
    """A client of which one changing call raises an error after it did its work: the answer was lost."""

    def __init__(self, client, at, error):
        self._client = client
        self._left = at
        self._error = error

    def __getattr__(self, name):
        call = getattr(self._client, name)
        return call if name.startswith(("search", "get")) else lambda *a, **k: self._count(call(*a, **k))

    def _count(self, answer):
        self._left -= 1
        if self._left == 0:
            raise self._error
        return answer


def held(client, record):
    """What MLflow holds of a run, in the words of its tags: nothing but ids and times of making are left out."""
    shown = []
    for run in client.search_runs(["1"], f"tags.`dflow.run` = '{record.name}'"):
        own = {name: value for name, value in run.data.tags.items() if name in ("dflow.node", "dflow.accepted")}
        points = [history(client, run.info.run_id, name) for name in sorted(run.data.metrics)]
        inputs = [entry.dataset.name for entry in run.inputs.dataset_inputs]
        shown.append((own, run.info.status, run.data.params, points, inputs))
    return sorted(shown, key=str)


def copied(record, number):
    """A record of the same run under another id."""
    copy = record.with_name(f"{record.name}-{number:02d}")
    shutil.copytree(record, copy)
    (copy / "state.jsonl").write_text((copy / "state.jsonl").read_text().replace(record.name, copy.name))
    return copy


@pytest.fixture(scope="module")
def unsent(tracked):
    """The record of a run that nothing was sent of."""
    tracked.toy.tracked = False
    record = tracked.run("-s", "d.steps=20")
    tracked.toy.tracked = True
    append_line(record / "events.jsonl", accepted("d"))
    return record


@pytest.mark.parametrize("error", [MlflowException("the server went away"), Killed()], ids=["away", "killed"])
def test_whatever_call_is_the_last_one_nothing_is_doubled_or_lost(tracked, unsent, error, monkeypatch):
    client, store = tracked.client, tracked.toy.store
    undisturbed = copied(unsent, 0 if isinstance(error, Killed) else 50)
    assert Sender(store, undisturbed).send() is None
    expected = held(client, undisturbed)
    assert [node for node, *_ in expected] == [
        {"dflow.node": "a"}, {"dflow.node": "b"}, {"dflow.node": "c"}, {"dflow.node": "d", "dflow.accepted": ANY}, {}
    ]  # fmt: skip
    for at in range(1, 50, 1 if isinstance(error, Killed) else 4):
        record = copied(unsent, at + (0 if isinstance(error, Killed) else 50))
        monkeypatch.setattr("executor.track.open_client", lambda *a, at=at: Failing(client, at, error))
        sender = Sender(store, record)
        with suppress(Killed):
            if sender.send() is None:
                break
            assert lacks(Record.load(record))
        monkeypatch.undo()
        assert Sender(store, record).send() is None
        assert held(client, record) == expected
        assert not lacks(Record.load(record))
    assert 20 < at < 49


def accepted(node):
    return {
        "time": 1.78e9, "node": node, "attempt": 0, "kind": "accepted", "key": "k" * 64, "digest": "d" * 64,
        "reason": "only renamed", "user": "ann",
    }  # fmt: skip


def test_an_accept_event_is_a_tag_on_the_child_that_made_the_artifact_and_is_sent_later_too(tracked):
    _, children = tracked.ids(tracked.first)
    append_line(tracked.first / "events.jsonl", accepted("c"))
    assert lacks(Record.load(tracked.first))
    for _ in range(2):
        assert follow.send_in_foreground(tracked.toy.store, tracked.first) is None
        assert not lacks(Record.load(tracked.first))
    tags = tracked.client.get_run(children["c"]).data.tags
    assert tags["dflow.accepted"] == "2026-05-28 20:26:40 UTC, ann: only renamed (key kkkkkkkkkkkk)"
    assert "dflow.accepted" not in tracked.client.get_run(children["d"]).data.tags
    assert tracked.client.get_run(children["c"]).info.status == "FINISHED"


def test_points_of_a_call_that_was_killed_are_not_doubled_by_the_next_attempt(tracked):
    """The points had arrived, that they had was not put down, and then a resumed attempt made them again."""
    record = tracked.run("-s", "d.steps=8")
    sent = read_json(record / "mlflow.json")
    sent["nodes"]["d"]["points"] = 0
    write_json(record / "mlflow.json", sent)
    line = {"time": 1.0, "node": "d", "attempt": 2}
    append_line(record / "events.jsonl", {**line, "kind": "cut", "step": 7})
    for step in (7, 8):
        append_line(record / "events.jsonl", {**line, "kind": "metric", "step": step, "metrics": {"steps/loss": 9.0}})
    assert Sender(tracked.toy.store, record).send() is None
    found = history(tracked.client, tracked.ids(record)[1]["d"], "steps/loss")
    assert sorted((step, value) for step, value, _ in found)[6:] == [(6, 1 / 7), (7, 1 / 8), (8, 9.0)]


def test_the_key_of_a_node_that_failed_and_was_fixed_is_the_new_one(tracked):
    record = tracked.run("-s", "d.steps=9")
    edited, sent = Record.load(record), read_json(record / "mlflow.json")
    edited.state.nodes["d"].key = "the key after the fix"
    edited.save_node("d")
    sent["nodes"]["d"]["status"] = "FAILED"
    write_json(record / "mlflow.json", sent)
    assert Sender(tracked.toy.store, record).send() is None
    tags = tracked.client.get_run(sent["nodes"]["d"]["run_id"]).data.tags
    assert tags["dflow.key"] == "the key after the fix"


def test_what_was_not_sent_before_the_executor_died_is_sent_on_resume(tmp_path):
    toy = Toy(tmp_path, ONE_NODE)
    assert toy.dflow("run", str(toy.file)).returncode == 0
    record = toy.store / "records" / toy.state()["run"]
    killed = Record.load(record)
    node = killed.state.nodes["a"]
    killed.state.status = node.state = "running"
    node.digest = node.ended = node.seconds = None
    killed.save_all()
    toy.calls()
    toy.tracked = True
    result = toy.dflow("resume")
    assert (result.returncode, toy.calls(), toy.caches()["a"]) == (0, [], ("done", "miss"))
    assert toy.state()["nodes"]["a"]["seconds"] > 0
    sent = read_json(record / "mlflow.json")
    assert (sent["parent_status"], sent["nodes"]["a"]["status"]) == ("FINISHED", "FINISHED")


def test_after_a_kill_in_the_middle_mlflow_holds_every_run_and_point_once(tmp_path):
    toy = Toy(tmp_path, tracked=True)
    process = toy.start("run", str(toy.file), "-s", "d.steps=100000", "-s", "d.seconds=0.05")
    wait_for(lambda: "steps/loss" in logged(toy), seconds=60)
    record = toy.store / "records" / toy.state()["run"]
    process.kill()
    process.communicate()
    child = read_json(record / "mlflow.json")["nodes"]["d"]["run_id"]
    reached = len(read_lines(record / "events.jsonl"))
    process = toy.start("resume")
    wait_for(lambda: len(read_lines(record / "events.jsonl")) > reached + 40, seconds=60)
    (tmp_path / "end").touch()
    process.communicate(timeout=60)
    assert process.returncode == 0
    client = open_client(toy.store, in_store(toy))
    runs = client.search_runs(["1"])
    assert sorted(run.data.tags.get("dflow.node", "parent") for run in runs) == ["a", "b", "c", "d", "parent"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert read_json(record / "mlflow.json")["nodes"]["d"]["run_id"] == child
    found = [step for step, _, _ in history(client, child, "steps/loss")]
    assert found == list(range(len(found)))
    tags = client.get_run(child).data.tags
    assert (tags["dflow.cache"], tags["dflow.attempts"]) == ("resumed", "2")


def logged(toy):
    """The metrics that MLflow holds already."""
    if not (toy.store / "mlflow.db").exists():
        return set()
    with closing(sqlite3.connect(f"file:{toy.store / 'mlflow.db'}?mode=ro", uri=True)) as database:
        try:
            return {row[0] for row in database.execute("SELECT DISTINCT key FROM metrics")}
        except sqlite3.OperationalError:  # the tables are being made
            return set()


def test_a_run_at_work_is_not_sent_by_another_process(tmp_path):
    toy = Toy(tmp_path, ONE_NODE)
    toy.dflow("run", str(toy.file))
    record = find_record(toy.store / "records", None)
    record.lock()
    result = toy.dflow("sync", record.run)
    record.unlock()
    assert (result.returncode, result.stderr) == (
        1,
        f"dflow: run {record.run} is still running; wait for it, or stop it first\n",
    )


def test_first_clients_at_once_make_the_database_one_after_the_other(tmp_path):
    program = (
        "import sys; from pathlib import Path; from executor.track import open_client, tracking_uri\n"
        "store = Path(sys.argv[1])\n"
        "print(len(open_client(store, tracking_uri(store, None, store)).search_experiments()))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    processes = [subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[0] for process in processes] == ["1\n"] * 2


def test_an_absent_mlflow_is_a_warning_and_the_rest_is_sent_later(tmp_path):
    missing = tmp_path / "away"
    missing.write_text("no folder")
    pipeline = ONE_NODE + f'\n[mlflow]\ntracking_uri = "sqlite:///{missing}/mlflow.db"\n'
    toy = Toy(tmp_path, pipeline, tracked=True)
    result = toy.dflow("run", str(toy.file))
    assert result.returncode == 0
    assert result.stderr.startswith("warning: MLflow cannot be reached (")
    assert result.stderr.endswith(f"nothing is lost: send it later with `dflow sync {toy.state()['run']}`\n")
    missing.unlink()
    missing.mkdir()
    result = toy.dflow("sync")
    record = toy.store / "records" / toy.state()["run"]
    assert (result.returncode, result.stdout) == (
        0,
        f"run {record.name}: sent 2 runs, 2 points, 4 files; "
        f"MLflow holds all of it (run {read_json(record / 'mlflow.json')['parent']})\n",
    )  # fmt: skip
    client = open_client(toy.store, f"sqlite:///{missing}/mlflow.db")
    children = read_json(record / "mlflow.json")["nodes"]
    assert client.get_run(children["a"]["run_id"]).data.metrics == {"make/length": 5.0}


def test_a_server_that_does_not_answer_is_a_warning(tmp_path):
    pipeline = ONE_NODE + '\n[mlflow]\ntracking_uri = "http://127.0.0.1:9"\n'
    toy = Toy(tmp_path, pipeline, tracked=True)
    result = toy.dflow("run", str(toy.file))
    assert result.returncode == 0
    assert "warning: MLflow cannot be reached" in result.stderr
    assert toy.caches()["a"] == ("done", "miss")
