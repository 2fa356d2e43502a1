"""A sweep in MLflow: one run with a run for each combination; an artifact that is a logged model; and the report."""

import json
import signal
from collections import Counter
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from report_page import Page
from toy_ops import OPS, UNTRACKED, WITHOUT_USAGE, wait_for
from tracked_toy import artifacts, client_of, ids, newest_record, send, tracked_toy

from dsl.files import read_json_or_none
from executor.commands.ui import links
from executor.tracking.mlflow_client import Tracker, tracking_uri

NOTE = "mlflow.note.content"
VIEW = "mlflow.sharedViewState.dflow"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SWEPT = """
[pipeline]
name = "swept"
ops = ["toy.py"]

[mlflow]
notes = "why it was run"

[node.a]
op = "make"
text = "hello"
source = "data.txt"

[node.b]
op = "upper"
text = "@a"

[node.judge]
op = "join"
texts = ["@a", "@b"]
"""
SWEEPS = ("--sweep", "b.times=[1,2]", "--sweep", "judge.weight=[1.0,3.0]")
MODEL = """

def as_model(folder):
    from ops.lib.logged_model import LoggedModel, Tensor
    if Path(__file__).with_name("busy").exists():
        raise OSError("the machine is busy")
    size = len((folder / "text.txt").read_text())
    return LoggedModel(
        kind="text", inputs=(Tensor("prompt", "str", (-1,)),), outputs=(Tensor("answer", "str", (size,)),),
        params={"size": str(size)}, tags={"serve": "cat text.txt"},
    )
"""


def changed_ops():
    """upper is a model that can be swept, join judges it, by its weight."""
    weight = '    weight: float = field(default=1.0, help="a number")\n    output = Text\n'
    ops = OPS.replace(weight, f'{weight}    judged_by = "join/weight"\n')
    ops = ops.replace("    text: Text\n    output = Text\n\n\ndef upper", TIMES)
    return ops.replace(".read_text().upper())", ".read_text().upper() * config.times)") + MODEL


TIMES = """    text: Text
    times: int = field(default=1, help="how often")
    output = Text

    @staticmethod
    def logged_model(folder):
        return as_model(folder)


def upper"""


def swept_toy(folder):
    toy = tracked_toy(folder, SWEPT, tracked=False)
    (toy.folder / "toy.py").write_text(changed_ops())
    (toy.folder / "data.txt").write_text("hello")
    return toy


def held_toy(folder):
    """A swept toy whose node `a` takes until the file `end` is there."""
    toy = swept_toy(folder)
    ops = toy.folder / "toy.py"
    until_end = f"while not Path({str(toy.folder / 'end')!r}).exists():\n        time.sleep(0.02)"
    ops.write_text(ops.read_text().replace("time.sleep(config.seconds)", until_end, 1))
    return toy


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of four, and what it printed."""
    toy = swept_toy(tmp_path_factory.mktemp("swept"))
    result = toy.dflow("run", str(toy.file), *SWEEPS)
    assert (result.returncode, result.stderr) == (0, "")
    calls = toy.calls()
    record = newest_record(toy)
    send(toy, record)
    return toy, record, result.stdout, calls


def events_of(toy):
    return toy.store.glob("records/*/events.jsonl")


def combinations_of(toy, record):
    client = client_of(toy)
    parent = client.get_run(ids(record)[0])
    wanted = f"tags.`dflow.run` = '{record.name}' AND tags.`dflow.kind` = 'combination'"
    found = client.search_runs([parent.info.experiment_id], wanted)
    return parent, {run.data.tags["dflow.combination"]: run for run in found}


def test_a_sweep_runs_what_is_above_it_once(swept):
    _toy, _record, _out, calls = swept
    assert sorted(["make", "upper", "upper", "join", "join", "join", "join"]) == sorted(calls)


def test_each_combination_is_a_run_below_the_sweep_with_params_and_metrics(swept):
    toy, record, _out, _calls = swept
    parent, found = combinations_of(toy, record)
    assert {
        f"times={times}, weight={weight}": (
            {"b.times": times, "judge.weight": str(weight)},
            {"join/length": length, "join/weight": weight, "weight": weight},
        )
        for times, length in (("1", 11.0), ("2", 16.0))
        for weight in (1.0, 3.0)
    } == {name: (run.data.params, run.data.metrics) for name, run in found.items()}
    assert {name: f"{name} ({record.name})" for name in found} == {
        name: run.info.run_name for name, run in found.items()
    }
    assert {"FINISHED"} == {run.info.status for run in found.values()}
    assert {parent.info.run_id} == {run.data.tags["mlflow.parentRunId"] for run in found.values()}
    assert parent.data.tags["dflow.kind"] == "sweep"
    assert {"weight": 3.0} == {name: parent.data.metrics[name] for name in parent.data.metrics if "weight" in name}


def test_nodes_of_one_combination_hang_below_it_and_shared_ones_below_the_sweep(swept):
    toy, record, _out, _calls = swept
    parent, found = combinations_of(toy, record)
    nodes = {name: client_of(toy).get_run(run_id) for name, run_id in ids(record)[1].items()}
    above = {name: run.data.tags["mlflow.parentRunId"] for name, run in nodes.items()}
    shared = ["a", "b-times_1", "b-times_2"]  # each b is of two combinations
    assert {name: above.pop(name) for name in shared} == dict.fromkeys(shared, parent.info.run_id)
    assert {
        f"judge-times_{times}-weight_{weight:.0f}_0": found[f"times={times}, weight={weight}"].info.run_id
        for times in (1, 2)
        for weight in (1.0, 3.0)
    } == above


def test_the_table_at_the_end_has_a_row_for_each_combination_the_best_first(swept):
    toy, _record, out, _calls = swept
    lines = out.splitlines()
    start = lines.index("results of 4 combinations, by join/weight")
    assert lines[start + 1].split() == ["b.times", "judge.weight", "join/weight", "join/length"]
    rows = [line.split() for line in lines[start + 2 : start + 6]]
    assert rows == [["1", "3.0", "3", "11"], ["2", "3.0", "3", "16"], ["1", "1.0", "1", "11"], ["2", "1.0", "1", "16"]]
    again = toy.dflow("run", str(toy.file), *SWEEPS, "--sort=-join/length").stdout.splitlines()
    start = again.index("results of 4 combinations, by join/length")
    assert [line.split()[2] for line in again[start + 2 : start + 6]] == ["11", "11", "16", "16"]
    unknown = toy.dflow("run", str(toy.file), *SWEEPS, "--sort=weight")
    assert unknown.returncode == 0
    assert "results of 4 combinations, by join/weight" in unknown.stdout.splitlines()
    assert "not sorted by weight: no combination has this metric; " in unknown.stdout
    assert unknown.stderr == 'warning: the table of the sweep is to be sorted by weight: did you mean "join/weight"?\n'


def test_an_artifact_that_is_a_model_is_a_logged_model_with_the_metrics_below_it(swept):
    toy, record, _out, _calls = swept
    client = client_of(toy)
    experiment = client.get_experiment_by_name("swept").experiment_id
    found = {model.name: model for model in client.search_logged_models([experiment], "tags.serve = 'cat text.txt'")}
    assert sorted(found) == ["b-times_1", "b-times_2"]
    model = found["b-times_2"]
    assert (model.model_type, str(model.status), model.params) == ("text", "READY", {"size": "10"})
    assert model.source_run_id == ids(record)[1]["b-times_2"]
    assert {(metric.key, metric.value) for metric in model.metrics} == {
        ("join/length", 16.0), ("join/weight", 1.0), ("join/weight", 3.0), ("weight", 1.0), ("weight", 3.0)
    }  # fmt: skip
    folder = toy.store / "mlartifacts" / "models" / model.model_id / "artifacts"
    signature = json.loads((folder / "MLmodel").read_text())["signature"]
    assert json.loads(signature["outputs"]) == [
        {"name": "answer", "type": "tensor", "tensor-spec": {"dtype": "str", "shape": [10]}}
    ]
    assert (folder / "text.txt").read_text() == "HELLOHELLO"


def test_the_sweep_has_its_report_a_description_and_the_data_that_was_read(swept):
    toy, record, _out, _calls = swept
    parent, _found = combinations_of(toy, record)
    assert "report.html" in artifacts(client_of(toy), parent.info.run_id)
    note = parent.data.tags["mlflow.note.content"]
    assert note.startswith("why it was run\n\n**done**")
    assert f"runs/{parent.info.run_id}/artifacts/report.html?workflowType=machine_learning)" in note
    assert "| b.times | judge.weight | state | join/weight | join/length |" in note
    assert ["data.txt"] == [entry.dataset.name for entry in parent.inputs.dataset_inputs]


def test_the_page_of_mlflow_is_told_with_links_to_the_runs_and_to_the_sweep_compared(swept):
    toy, record, _out, _calls = swept
    parent, found = combinations_of(toy, record)
    experiment = parent.info.experiment_id
    runs, compared = links(toy.store / "records", "http://there:5000")
    address = f"http://there:5000/#/experiments/{experiment}/runs?workflowType=machine_learning&viewStateShareKey=dflow"
    assert runs == f"runs: {address}"
    view = json.loads(client_of(toy).get_experiment(experiment).tags[VIEW])
    assert "metrics.`weight`" in view["selectedColumns"], "what the result is judged by, join/weight"
    assert ["params.`b.times`", "params.`judge.weight`"] == view["selectedColumns"][-2:], (
        "what tells combinations apart"
    )
    head, _, query = compared.partition("#/compare-runs?")
    assert head == "the last sweep, compared: http://there:5000/"
    assert query.startswith("runs="), "MLflow reads it only as the first"
    listed, _, kind = query.rpartition("&")
    assert "workflowType=machine_learning" == kind
    asked = {name: json.loads(value) for name, [value] in parse_qs(listed).items()}
    ids_found = {run.info.run_id for run in found.values()}
    assert (set(asked["runs"]), asked["experiments"]) == (ids_found, [experiment])
    assert list(links(toy.folder / "nothing", "http://there:5000")) == []


def test_the_view_of_an_experiment_keeps_the_columns_that_other_runs_put_there(tmp_path):
    toy = tracked_toy(tmp_path)
    client = client_of(toy)
    tracker = Tracker(toy.store, tracking_uri(toy.store, None, toy.folder), Counter())
    columns = []
    for metrics, params in ((["tau"], []), ([], []), (["accuracy"], ["train.lr"])):
        experiment = tracker.experiment("shapes", metrics, params)
        columns.append(json.loads(client.get_experiment(experiment).tags[VIEW])["selectedColumns"])
    own = ["attributes.`Created`", "attributes.`Duration`", "attributes.`User`"]
    first = [*own, "metrics.`tau`"]
    assert [first, first, [*first, "metrics.`accuracy`", "params.`train.lr`"]] == columns
    for damaged in ("no view", "[1]", '{"selectedColumns": 1}'):
        client.set_experiment_tag(experiment, VIEW, damaged)
        tracker.experiment("shapes", ["tau"])
        assert first == json.loads(client.get_experiment(experiment).tags[VIEW])["selectedColumns"]


def test_sending_all_of_it_again_changes_nothing(swept):
    toy, record, _out, _calls = swept
    client = client_of(toy)
    experiment = client.get_experiment_by_name("swept").experiment_id

    def held():
        runs = client.search_runs([experiment])
        models = client.search_logged_models([experiment])
        return {run.info.run_id: (run.data.metrics, run.data.params) for run in runs}, {
            model.model_id: sorted((metric.run_id, metric.key, metric.value) for metric in model.metrics)
            for model in models
        }

    before = held()
    sent = read_json_or_none(record / "mlflow.json")
    (record / "mlflow.json").unlink()
    send(toy, record)
    assert before == held()
    assert sent["parent"] == read_json_or_none(record / "mlflow.json")["parent"]


def test_a_sweep_killed_in_the_middle_goes_on_to_the_same_four_runs(tmp_path):
    toy = held_toy(tmp_path)
    calls = toy.folder / "calls.txt"
    first = toy.start("run", str(toy.file), *SWEEPS)
    wait_for(lambda: calls.exists() and "make" in calls.read_text(), seconds=60)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    record = newest_record(toy)
    send(toy, record)
    parent, killed = combinations_of(toy, record)
    assert {"KILLED"} == {run.info.status for run in killed.values()}
    assert parent.data.tags[NOTE].startswith("why it was run\n\n**killed** after ")
    times = killed["times=2, weight=3.0"].data.tags[NOTE]
    left = "b-times_2, judge-times_2-weight_3_0"
    assert times.startswith(f"One combination of run {record.name}; not done in a killed run: {left}. [Report](")
    (toy.folder / "end").touch()
    resumed = toy.dflow("resume")
    assert resumed.returncode == 0
    assert "results of 4 combinations, by join/weight" in resumed.stdout
    send(toy, record)
    _parent, found = combinations_of(toy, record)
    assert {name: run.info.run_id for name, run in killed.items()} == {
        name: run.info.run_id for name, run in found.items()
    }
    assert {"FINISHED"} == {run.info.status for run in found.values()}
    assert {1.0, 3.0} == {run.data.metrics["join/weight"] for run in found.values()}


def test_a_combination_that_failed_is_told_and_the_others_are_done(tmp_path):
    toy = swept_toy(tmp_path)
    source = (toy.folder / "toy.py").read_text()
    failing = source.replace(
        '    count_call("upper")\n',
        '    count_call("upper")\n    if config.times == 2:\n        raise DataError("no")\n',
    )
    (toy.folder / "toy.py").write_text(failing)
    result = toy.dflow("run", str(toy.file), *SWEEPS, "--keep-going")
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    start = lines.index("results of 4 combinations, by join/weight")
    states = [line.split()[2] for line in lines[start + 2 : start + 6]]
    assert states == ["done", "done", "failed", "failed"]
    record = newest_record(toy)
    send(toy, record)
    _parent, found = combinations_of(toy, record)
    assert {name: run.info.status for name, run in found.items()} == {
        f"times={times}, weight={weight}": "FINISHED" if times == 1 else "FAILED"
        for times in (1, 2)
        for weight in (1.0, 3.0)
    }
    told = f"One combination of run {record.name}"
    blocked = "judge-times_2-weight_1_0 not run: b-times_2 failed"
    assert found["times=2, weight=1.0"].data.tags[NOTE].startswith(f"{told}; failed: b-times_2; {blocked}. [Report](")
    assert found["times=1, weight=1.0"].data.tags[NOTE].startswith(f"{told}. [Report](")


def test_what_a_node_uses_of_the_machine_is_a_system_metric_and_no_figure_of_it(tmp_path):
    toy = held_toy(tmp_path)
    process = toy.start("run", str(toy.file), program=UNTRACKED.replace(WITHOUT_USAGE, ""))
    used = ("memory_usage_megabytes", "cpu_utilization_percentage")
    wait_for(lambda: all(name in "".join(map(Path.read_text, events_of(toy))) for name in used))
    (toy.folder / "end").touch()
    out, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    assert "system/" not in out
    record = newest_record(toy)
    send(toy, record)
    run = client_of(toy).get_run(ids(record)[1]["a"])
    assert {"make/length", "system/memory_usage_megabytes", "system/cpu_utilization_percentage"} == set(
        run.data.metrics
    )
    assert run.data.metrics["system/memory_usage_megabytes"] > 1
    assert toy.state()["nodes"]["a"]["metrics"] == {"make/length": 5.0}


def test_a_report_that_fails_is_a_warning_and_sync_sends_it_later(tmp_path):
    toy = swept_toy(tmp_path)
    assert toy.dflow("run", str(toy.file)).returncode == 0
    record = newest_record(toy)
    (record / "report.html").mkdir()
    result = toy.dflow("sync")
    assert result.returncode == 1
    assert "the report of the run could not be written" in result.stderr
    (record / "report.html").rmdir()
    result = toy.dflow("sync")
    assert result.returncode == 0
    assert "report.html" in artifacts(client_of(toy), ids(record)[0])
    assert client_of(toy).get_run(ids(record)[0]).info.status == "FINISHED"


def test_a_model_that_failed_once_is_sent_later_with_the_metrics_that_judge_it(tmp_path):
    toy = swept_toy(tmp_path)
    (toy.folder / "busy").touch()
    assert toy.dflow("run", str(toy.file), "--sweep", "judge.weight=[1.0,3.0]").returncode == 0
    record = newest_record(toy)
    for _ in range(2):
        result = toy.dflow("sync")
        assert (result.returncode, "MLflow lacks the model of b: " in result.stderr) == (1, True)
    (toy.folder / "busy").unlink()
    assert toy.dflow("sync").returncode == 0
    client = client_of(toy)
    parent, found = combinations_of(toy, record)
    [model] = client.search_logged_models([parent.info.experiment_id])
    assert {(metric.run_id, metric.key, metric.value) for metric in model.metrics} == {
        (run.info.run_id, name, value) for run in found.values() for name, value in run.data.metrics.items()
    }
    assert {"FINISHED"} == {parent.info.status, *(run.info.status for run in found.values())}
    assert "nothing to send to MLflow" in toy.dflow("sync").stdout


def test_of_two_nodes_that_judge_a_model_both_figures_are_its_tags_and_those_stand_first(tmp_path, monkeypatch):
    toy = swept_toy(tmp_path)
    toy.file.write_text(SWEPT + '\n[node.long]\nop = "join"\ntexts = ["@b", "@b"]\nweight = 7.0\n')
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    order = []
    log_results = Tracker.log_results

    def logged(self, run_id, results, model_id=None):
        order.extend(name for _, values in results for name in values if model_id is None)
        log_results(self, run_id, results, model_id)

    monkeypatch.setattr(Tracker, "log_results", logged)
    record = newest_record(toy)
    send(toy, record)
    client = client_of(toy)
    experiment = client.get_experiment_by_name("swept").experiment_id
    [model] = client.search_logged_models([experiment])
    tags = {name: value for name, value in model.tags.items() if name.endswith("join/weight")}
    assert {"join/weight": "1", "judge/join/weight": "1", "long/join/weight": "7"} == tags
    judge, long = ([f"{node}/join/weight", f"{node}/join/length"] for node in ("judge", "long"))
    assert ["weight", *judge, *long] == order
    assert 1.0 == client.get_run(ids(record)[0]).data.metrics["weight"], "of the first of the nodes"


def test_a_sweep_of_what_several_runs_made_before_is_a_sweep_in_mlflow_of_its_own(tmp_path):
    toy = swept_toy(tmp_path)
    makers = []
    for weight in ("1.0", "3.0"):
        assert 0 == toy.dflow("run", str(toy.file), "-s", f"judge.weight={weight}").returncode
        makers.append(newest_record(toy).name)
    result = toy.dflow("run", str(toy.file), "--sweep", "judge.weight=[1.0,3.0]")
    record = newest_record(toy)
    assert (0, "") == (result.returncode, result.stderr)
    assert "its results are those of" not in result.stdout
    assert f"run {record.name} is done" in result.stdout
    assert set(makers) == {node["source_run"] for name, node in toy.state()["nodes"].items() if "judge" in name}
    send(toy, record)
    parent, found = combinations_of(toy, record)
    assert "sweep" == parent.data.tags["dflow.kind"]
    assert {"weight=1.0": 1.0, "weight=3.0": 3.0} == {
        name: run.data.metrics["join/weight"] for name, run in found.items()
    }


def test_a_sweep_that_one_sweep_made_before_has_the_results_of_that_one(swept):
    toy, record, _out, _calls = swept
    result = toy.dflow("run", str(toy.file), *SWEEPS)
    assert f"is done, its results are those of run {record.name}" in result.stdout
    assert not (newest_record(toy) / "mlflow.json").exists()
    result = toy.dflow("run", str(toy.file), *SWEEPS[:2], "-s", "judge.weight=3.0")
    assert "its results are those of" not in result.stdout, "of the four these are two others to compare"


def test_status_tells_of_a_sweep_as_its_end_did_and_of_what_is_judged_first(swept, tmp_path):
    toy, record, out, _calls = swept
    table = out[out.index("results of 4 combinations, by join/weight") : out.index(f"run {record.name} is done")]
    assert table in toy.dflow("status", record.name).stdout
    again = swept_toy(tmp_path)
    assert 0 == again.dflow("run", str(again.file), "--sweep", "b.times=[1,2]").returncode
    told = again.dflow("status", XDG_STATE_HOME=str(tmp_path / "of another user"))
    assert 0 == told.returncode
    why = "not one that you made here, at this place; read it, then repeat the command with --trust"
    assert f"no combinations: the store {again.store} is {why}\n" == told.stderr
    assert "results of judge-times_1, judge-times_2" in told.stdout, "without its ops, the copies beside each other"
    rows = [line.split()[0] for line in told.stdout.splitlines() if line.startswith("join/")]
    assert ["join/weight", "join/length"] == rows


def test_the_report_tells_what_is_judged_first_whatever_it_is_called(tmp_path):
    toy = swept_toy(tmp_path)
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    page = Page.read(Path(toy.dflow("report").stdout.strip()))
    assert [["join/weight", "1"], ["join/length", "11"]] == page.table("results", "figure")
