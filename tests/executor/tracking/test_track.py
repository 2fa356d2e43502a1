"""What MLflow holds of a run."""

import hashlib
import json
import re

import attrs
import pytest
from report_page import Page
from tracked_toy import artifacts, child, client_of, history, ids, newest_record, send, tracked_toy

from dsl.files import compact, read_lines
from executor.records.run_record import Record, RunState
from executor.system.user_cache import user_name
from executor.tracking.contents import FILE_LIMIT
from executor.tracking.mlflow_client import VIEW_TAG
from executor.tracking.run_description import run_name

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CALLED = '(stage.out_dir / "text.txt").write_text(joined)'


class Tracked:
    """A store in which the pipeline ran twice, the second time with another value for its last node."""

    def __init__(self, toy):
        self.toy = toy
        source = (toy.folder / "toy_join.py").read_text()
        large = CALLED + f'\n    (stage.out_dir / "large.bin").write_bytes(bytes({FILE_LIMIT} + 1))'
        (toy.folder / "toy_join.py").write_text(source.replace(CALLED, large))
        self.first = self.run()
        toy.tracked = False  # that a run is sent as it goes on is seen by the first one
        self.second = self.run("-s", "d.steps=7")
        toy.tracked = True
        send(toy, self.second)
        self.client = client_of(toy)

    def run(self, *overrides):
        result = self.toy.dflow("run", str(self.toy.file), *overrides)
        assert (result.returncode, result.stderr) == (0, "")
        return newest_record(self.toy)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    return Tracked(tracked_toy(tmp_path_factory.mktemp("tracked")))


def test_a_run_is_a_parent_with_a_child_for_every_node(tracked):
    parent, children = ids(tracked.first)
    run = tracked.client.get_run(parent)
    assert (run.info.status, run.info.run_name) == ("FINISHED", tracked.first.name)
    assert tracked.client.get_experiment(run.info.experiment_id).name == "toy"
    found = tracked.client.search_runs([run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent}'")
    assert {child.info.run_id: (child.info.run_name, child.info.status) for child in found} == {
        run_id: (f"{name} ({tracked.first.name})", "FINISHED") for name, run_id in children.items()
    }
    assert list(children) == ["a", "b", "c", "d"]


def test_the_name_of_a_run_begins_with_what_no_other_has():
    state = RunState(run="20261125-225957-67b9", pipeline="toy", experiment="toy")
    assert run_name(state) == "20261125-225957-67b9"
    assert run_name(attrs.evolve(state, experiment="all of them")) == "20261125-225957-67b9 toy"


def test_every_run_has_its_source_and_its_user(tracked):
    parent, children = ids(tracked.first)
    for run_id in (parent, children["a"]):
        tags = tracked.client.get_run(run_id).data.tags
        assert ("dflow: toy", "LOCAL") == (tags["mlflow.source.name"], tags["mlflow.source.type"])
        assert user_name() == tags["mlflow.user"] != ""


def test_a_run_took_as_long_in_mlflow_as_in_every_table(tmp_path):
    toy = tracked_toy(tmp_path, tracked=False)
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    record = newest_record(toy)
    moments = [(100.0, "started"), (400.0, "stopped"), (5000.0, "started"), (5088.0, "done")]
    lines = read_lines(record / "events.jsonl")
    events = [{**lines[-1], "time": at, "state": state} for at, state in moments]
    of_nodes = [line for line in lines if line["node"]]
    (record / "events.jsonl").write_bytes(b"".join(map(compact, [*of_nodes, *events])))
    send(toy, record)
    client, parent = client_of(toy), ids(record)[0]
    run = client.get_run(parent)
    assert 388_000 == run.info.end_time - run.info.start_time
    assert "after 6 min 28 s" in run.data.tags["mlflow.note.content"]
    assert "6 min 28 s" in toy.dflow("runs").stdout
    assert 388.0 == json.loads(toy.dflow("runs", "--json").stdout)["runs"][0]["seconds"]
    assert f"run {record.name}: done, 6 min 28 s" in toy.dflow("status").stdout
    assert 388.0 == json.loads(toy.dflow("status", "--json").stdout)["seconds"]
    assert ["took", "6 min 28 s"] in Page.read(record / "report.html").tables["runs"][0]


def test_the_tags_of_a_child_are_these(tracked):
    parent, children = ids(tracked.first)
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
        "dflow.kind": "node",
    }


def test_the_params_are_the_flat_config(tracked):
    parent, children = ids(tracked.first)
    expected = {"op": "join", "texts": '["@a", "@b"]', "between": "-", "weight": "1.0"}
    assert expected == tracked.client.get_run(children["c"]).data.params
    of_parent = tracked.client.get_run(parent).data.params
    assert {"c.op": "join", "c.between": "-", "c.weight": "1.0"} == {
        name: value for name, value in of_parent.items() if name.startswith("c.")
    }


def test_metrics_have_the_steps_and_times_of_the_events(tracked):
    parent, children = ids(tracked.first)
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
    _, children = ids(tracked.first)
    assert artifacts(tracked.client, children["c"]) == [
        "artifact/text.txt", "c.log", "figures/plot.png", "manifest.json", "references.json"
    ]  # fmt: skip
    folder = tracked.toy.store / "mlartifacts" / children["c"] / "artifacts"
    references = json.loads((folder / "references.json").read_text())
    digest = tracked.client.get_run(children["c"]).data.tags["dflow.digest"]
    assert references["large.bin"]["size"] == FILE_LIMIT + 1
    assert references["large.bin"]["path"] == str(tracked.toy.store / "objects" / digest / "large.bin")


def test_inputs_are_datasets(tracked):
    _, children = ids(tracked.first)
    nodes = attrs.asdict(Record.load(tracked.first).state)["nodes"]
    found = tracked.client.get_run(children["c"]).inputs.dataset_inputs
    assert sorted((entry.dataset.name, entry.dataset.digest, entry.tags[0].value) for entry in found) == [
        ("a", nodes["a"]["digest"][:36], "texts"),
        ("b", nodes["b"]["digest"][:36], "texts"),
    ]


def test_a_cached_node_has_a_child_that_names_the_run_that_made_it(tracked):
    _, children = ids(tracked.second)
    run = tracked.client.get_run(children["c"])
    assert (run.info.status, run.data.tags["dflow.cache"], run.data.tags["dflow.source_run"]) == (
        "FINISHED",
        "hit",
        tracked.first.name,
    )
    assert run.data.tags["dflow.source_mlflow_run"] == ids(tracked.first)[1]["c"]
    assert run.data.metrics == {"join/length": 11.0, "join/weight": 1.0}
    assert artifacts(tracked.client, children["c"]) == ["manifest.json"]


def test_a_run_in_which_nothing_ran_makes_none_and_names_the_one_with_the_results(tracked):
    before = len(tracked.client.search_runs(["1"]))
    result = tracked.toy.dflow("run", str(tracked.toy.file))
    assert f"results in MLflow run {ids(tracked.first)[0]}" in result.stdout
    assert len(tracked.client.search_runs(["1"])) == before
    run = re.search(r"^run (\S+) is done", result.stdout, re.MULTILINE)[1]
    shown = json.loads(tracked.toy.dflow("status", run, "--json").stdout)
    assert {row["id"]: row["mlflow_run_id"] for row in shown["nodes"]} == ids(tracked.first)[1]


READING = """
[pipeline]
name = "reading"
ops = ["toy.py"]

[node.a]
op = "make"
source = "some data.txt"
launch = { cpus = 2, memory = "1 GiB", retries = 5, timeout = 60.0 }
"""


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    """A pipeline whose node reads a file, and the child that it has in MLflow."""
    toy = tracked_toy(tmp_path_factory.mktemp("reading"), READING, tracked=False)
    (toy.folder / "some data.txt").write_text("hello")
    assert toy.dflow("run", str(toy.file)).returncode == 0
    record = newest_record(toy)
    send(toy, record)
    return toy, child(toy, record, "a")


def test_files_that_a_config_names_are_datasets_too(reading):
    toy, run = reading
    content = hashlib.sha256(b"hello").hexdigest()
    [entry] = run.inputs.dataset_inputs
    assert (entry.dataset.name, entry.dataset.digest, entry.tags[0].value) == ("some data.txt", content[:36], "source")
    assert json.loads(entry.dataset.source) == {"path": str(toy.folder / "some data.txt"), "digest": content}


def test_a_param_of_launch_that_most_nodes_leave_as_it_is_is_there_where_it_was_given(reading):
    _, run = reading
    assert {name: value for name, value in run.data.params.items() if name.startswith("launch.")} == {
        "launch.cpus": "2", "launch.memory": "1 GiB", "launch.retries": "5",
        "launch.timeout": "60.0",
    }  # fmt: skip


def test_a_run_has_its_name_and_what_was_changed_for_it_in_mlflow_and_in_the_list_of_runs(tmp_path):
    toy = tracked_toy(tmp_path, tracked=False)
    arguments = ("-s", "c.between=+", "-s", "mlflow.notes=http://user:word@host", "-s", "pipeline.seed=7")
    assert toy.dflow("run", str(toy.file), "--name", "with plus", *arguments).returncode == 0
    record = newest_record(toy)
    send(toy, record)
    run = client_of(toy).get_run(ids(record)[0])
    assert f"with plus {record.name} " in f"{run.info.run_name} "
    assert ("+", "7") == (run.data.params["c.between"], run.data.params["seed"])
    assert "c.between=+\npipeline.seed=7" == run.data.tags["dflow.set"]
    view = client_of(toy).get_experiment(run.info.experiment_id).tags[VIEW_TAG]
    assert ["params.`c.between`", "params.`seed`"] == json.loads(view)["selectedColumns"][-2:]
    header, row = toy.dflow("runs").stdout.splitlines()[:2]
    assert row[header.index("name") :].startswith("with plus ")
    assert row[header.index(" set ") + 1 :].startswith("c.between=+, pipeline.seed=7")
    assert toy.dflow("resume", "--from", "c", "-s", "c.weight=2.0").returncode == 0
    rows = json.loads(toy.dflow("runs", "--json").stdout)["runs"]
    assert [["c.between=+", "pipeline.seed=7", "c.weight=2.0"], ["c.between=+", "pipeline.seed=7"]] == [
        each["set"] for each in rows
    ]
