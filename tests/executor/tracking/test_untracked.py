"""Runs without tracking: where the pipeline says so, and on a machine without MLflow."""

import json

import pytest
from toy_ops import ONE_NODE, WITHOUT_USAGE, Toy
from tracked_toy import fresh_database, newest_record

from dsl.compile import compile_pipeline, override_graph
from dsl.files import read_json_or_none
from dsl.graph import graph_from_json, graph_to_json
from dsl.pipeline import Pipeline
from executor.records.run_record import Record
from executor.tracking.mlflow_client import open_client
from executor.tracking.sync_state import lacks, send_rest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

# As where MLflow was never installed: neither found nor loaded.
ABSENT = (
    f"{WITHOUT_USAGE}\nimport sys; sys.modules['mlflow'] = None; import executor.cli; sys.exit(executor.cli.main())"
)
OFF = ("-s", "mlflow.tracking=false")


def without_mlflow(toy, *arguments):
    process = toy.start(*arguments, program=ABSENT)
    printed, errors = process.communicate(timeout=120)
    return process.returncode, printed, errors


def test_without_mlflow_a_tracked_run_ends_before_anything_runs_and_names_the_switch(tmp_path):
    toy = Toy(tmp_path, ONE_NODE)
    code, _, errors = without_mlflow(toy, "run", str(toy.file))
    assert code != 0
    expected = "mlflow.tracking: mlflow is not installed here, so the run cannot be tracked (install it (pip install "
    (line,) = errors.splitlines()
    assert line.endswith(f"{expected}mlflow), or run without tracking: -s mlflow.tracking=false)")
    assert [] == toy.calls()
    assert not any(toy.store.glob("records/*"))


def test_without_mlflow_an_untracked_run_is_done_and_is_sent_when_somebody_asks_for_it(tmp_path):
    toy = Toy(tmp_path, f"{ONE_NODE}\n[mlflow]\ntracking = false\n")
    code, printed, errors = without_mlflow(toy, "run", str(toy.file))
    assert (0, "") == (code, errors)
    assert ["make"] == toy.calls()
    record = Record.load(newest_record(toy))
    assert "MLflow" not in printed
    assert not lacks(record)
    assert not (toy.store / "mlflow.db").exists()
    assert (0, "") == without_mlflow(toy, "run", str(toy.file))[::2]  # everything is cached
    code, _, errors = without_mlflow(toy, "sync", record.run)
    assert code == 1
    assert "mlflow is not installed here, so nothing can be sent to it" in errors
    assert "nothing to send to MLflow" in toy.dflow("sync").stdout

    (toy.store / "mlflow.db").write_bytes(fresh_database())
    warning, counts = send_rest(toy.store, record.folder)
    assert (None, 2) == (warning, counts["runs"])
    sent = read_json_or_none(record.folder / "mlflow.json")
    client = open_client(toy.store, f"sqlite:///{toy.store / 'mlflow.db'}")
    assert "FINISHED" == client.get_run(sent["nodes"]["a"]["run_id"]).info.status


def test_a_run_that_needs_nothing_done_is_not_refused_without_mlflow(tmp_path):
    toy = Toy(tmp_path, ONE_NODE)
    assert 0 == without_mlflow(toy, "run", str(toy.file), *OFF)[0]
    code, printed, _ = without_mlflow(toy, "run", str(toy.file))
    assert code == 0
    assert "nothing to do: the only node is cached" in printed


def test_a_resumed_run_stays_untracked_and_the_graph_keeps_the_switch(tmp_path):
    toy = Toy(tmp_path, ONE_NODE)
    assert 0 == without_mlflow(toy, "run", str(toy.file), *OFF)[0]
    assert 0 == without_mlflow(toy, "resume", "--from", "a")[0]
    assert not Record.load(newest_record(toy)).state.tracking

    off, on = (compile_pipeline(Pipeline("toy", tracking=tracking)) for tracking in (False, True))
    assert [False, True] == [graph_to_json(g)["tracking"] for g in (off, on)]
    assert [False, True] == [graph_from_json(json.loads(json.dumps(graph_to_json(g)))).tracking for g in (off, on)]
    assert not override_graph(off, ["mlflow.notes=x"]).tracking
