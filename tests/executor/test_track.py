"""What MLflow holds of a run, and what happens when it cannot be reached."""

import json
import subprocess
import sys

import pytest
from toy_ops import ONE_NODE, PROJECT, Toy

from executor.jsonlines import append_line, read_json, write_json
from executor.track import FILE_LIMIT, Sender

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
        return Sender(self.toy.store, self.first).client(None)


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
    node = json.loads((tracked.first / "state.json").read_text())["nodes"]["c"]
    tags = tracked.client.get_run(children["c"]).data.tags
    assert {
        name: value for name, value in tags.items() if name.startswith("dflow.") or name == "mlflow.parentRunId"
    } == {
        "mlflow.parentRunId": parent,
        "dflow.node": "c",
        "dflow.op": "join",
        "dflow.key": node["key"],
        "dflow.digest": node["digest"],
        "dflow.cache": "miss",
    }


def test_the_params_are_the_flat_config(tracked):
    parent, children = tracked.ids(tracked.first)
    expected = {
        "op": "join", "texts": "['@a', '@b']", "extra": "None", "between": "-", "weight": "1.0",
        "launch.kind": "process", "launch.nproc": "1", "launch.device": "auto", "launch.threads": "0",
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
    nodes = json.loads((tracked.first / "state.json").read_text())["nodes"]
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
    sent["nodes"]["d"]["sent"] = 0
    write_json(tracked.second / "mlflow.json", sent)
    assert Sender(tracked.toy.store, tracked.second).send() is None
    assert history(tracked.client, children["d"], "steps/loss") == before
    assert tracked.ids(tracked.second)[1] == children


def test_points_that_a_resumed_attempt_made_again_are_there_once(tracked):
    _, children = tracked.ids(tracked.second)
    line = {"time": 1.0, "node": "d", "attempt": 2}
    append_line(tracked.second / "events.jsonl", {**line, "kind": "cut", "step": 2})
    append_line(tracked.second / "events.jsonl", {**line, "kind": "metric", "step": 2, "metrics": {"steps/loss": 9.0}})
    assert Sender(tracked.toy.store, tracked.second).send() is None
    again = tracked.ids(tracked.second)[1]["d"]
    found = history(tracked.client, again, "steps/loss")
    assert sorted((step, value) for step, value, _ in found) == [(0, 1.0), (1, 0.5), (2, 9.0)]
    assert tracked.client.get_run(children["d"]).info.lifecycle_stage == "deleted"
    assert tracked.client.get_run(again).info.status == "FINISHED"


def test_first_clients_at_once_make_the_database_one_after_the_other(tmp_path):
    program = (
        "import sys; from pathlib import Path; from executor.track import Sender\n"
        "print(len(Sender(Path(sys.argv[1]), Path(sys.argv[1])).client(None).search_experiments()))"
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
        0, f"run {record.name}: MLflow holds all of it (run {read_json(record / 'mlflow.json')['parent']})\n"
    )  # fmt: skip
    client = Sender(toy.store, record).client(f"sqlite:///{missing}/mlflow.db")
    children = read_json(record / "mlflow.json")["nodes"]
    assert client.get_run(children["a"]["run_id"]).data.metrics == {"make/length": 5.0}


def test_a_server_that_does_not_answer_is_a_warning(tmp_path):
    pipeline = ONE_NODE + '\n[mlflow]\ntracking_uri = "http://127.0.0.1:9"\n'
    toy = Toy(tmp_path, pipeline, tracked=True)
    result = toy.dflow("run", str(toy.file))
    assert result.returncode == 0
    assert "warning: MLflow cannot be reached" in result.stderr
    assert toy.caches()["a"] == ("done", "miss")
