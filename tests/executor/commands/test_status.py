"""`dflow status` and `dflow runs`: what is told of runs that are over, running, or were killed."""

import json
import math
import re
from pathlib import Path

import pytest
from manifests import new_record

from dsl.files import append_line, write_json
from dsl.finding import Finding, Node
from dsl.graph import Graph
from dsl.launch import Machine
from executor import cli
from executor.launchers.cluster_address import remember_cluster
from executor.records.run_record import NodeState
from executor.store.artifact_store import Store


@pytest.fixture
def store(tmp_path):
    return Store.open(tmp_path / "runs", write=True)


def a_run(store, pipeline="toy", **nodes):
    record = new_record(store.records, Graph(pipeline, 0, pipeline, None, Path("/"), (), {}), nodes=nodes)
    write_json(record.folder / "graph.json", {"nodes": [{"id": node_id, "op": "make"} for node_id in nodes]})
    return record


def a_running_run(store, pipeline="toy"):
    done = NodeState(state="done", cache="miss", digest="d", seconds=1.0, ended=2.0)
    record = a_run(store, pipeline, a=done, b=NodeState(state="running", cache="miss", attempt=2, started=1.0))
    record.lock()
    line = {"time": 1.0, "node": "b", "attempt": 1}
    append_line(record.events_path, {**line, "kind": "progress", "done": 9, "total": 10})
    for done, metrics in ((1, {"loss": 0.5, "lr": 0.1}), (2, {"loss": 0.25})):
        append_line(record.events_path, {**line, "attempt": 2, "kind": "metric", "step": done, "metrics": metrics})
        append_line(record.events_path, {**line, "attempt": 2, "kind": "progress", "done": done, "total": 10})
    return record


def dflow(store, capsys, *arguments):
    assert cli.main([*arguments, "--store", str(store.path)]) == 0
    return capsys.readouterr().out


def test_of_a_running_node_the_newest_figures_of_this_attempt_are_told(store, capsys):
    record = a_running_run(store)
    shown = dflow(store, capsys, "status").splitlines()
    assert shown[3].split()[:3] == ["b", "running", "miss"]
    assert shown[3].endswith("  2 of 10: loss 0.25")
    assert re.fullmatch(rf"run {record.run}: running, [\d.]+ s", shown[-1])
    rows = json.loads(dflow(store, capsys, "status", "--json"))["nodes"]
    assert [(row["id"], row["op"], row["metrics"], row.get("progress")) for row in rows] == [
        ("a", "make", {}, None),
        ("b", "make", {"loss": 0.25}, {"done": 2, "total": 10}),
    ]


def test_figures_that_are_no_number_are_null_in_json(store, capsys):
    metrics = {"loss": math.nan, "best": math.inf, "steps": 3}
    record = a_run(store, a=NodeState(state="done", digest="d", metrics=metrics), b=NodeState(state="running"))
    record.lock()
    line = {"time": 1.0, "node": "b", "attempt": 0, "kind": "metric", "step": 1, "metrics": {"loss": -math.inf}}
    append_line(record.events_path, line)
    said = dflow(store, capsys, "status", "--json")
    rows = json.loads(said, parse_constant=pytest.fail)["nodes"]
    assert [{"loss": None, "best": None, "steps": 3}, {"loss": None}] == [row["metrics"] for row in rows]


def test_of_two_runs_at_once_both_are_named(store, capsys):
    first, second = a_running_run(store, "one"), a_running_run(store, "two")
    a_run(store, "killed")
    shown = dflow(store, capsys, "status", second.run).splitlines()
    assert shown[-1].startswith(f"run {second.run}: running, ")
    shown = dflow(store, capsys, "status").splitlines()
    assert shown[-2:] == [
        f"run {second.run} of two is also running: dflow status --store {store.path} {second.run}",
        f"run {first.run} of one is also running: dflow status --store {store.path} {first.run}",
    ]


def test_a_killed_run_says_so_and_how_to_go_on(store, capsys):
    record = a_running_run(store)
    record.unlock()
    shown = dflow(store, capsys, "status").splitlines()
    assert shown[3].split() == ["b", "pending", "miss", "reached", "2", "of", "10:", "loss", "0.25"]
    assert shown[-1] == f"run {record.run}: killed, 0.0 s; resume with: dflow resume --store {store.path} {record.run}"
    shown = dflow(store, capsys, "runs").splitlines()
    assert shown[1].split()[2] == "killed"
    assert shown[-1] == f"the newest was killed; resume it with: dflow resume --store {store.path} {record.run}"


def test_of_an_error_of_several_lines_the_first_is_shown_with_a_sign(store, capsys):
    a_run(
        store, a=NodeState(state="failed", failure=Finding("DataError: two lines\nof text", Node("a"))), b=NodeState()
    )
    assert dflow(store, capsys, "status").splitlines()[2].endswith("DataError: two lines ...")


def test_of_a_long_run_the_cached_nodes_are_counted(store, capsys):
    cached = {f"n{k}": NodeState(state="done", cache="hit", digest="d") for k in range(60)}
    a_run(store, **cached, x=NodeState(state="failed", failure=Finding("DataError: x", Node("x"))))
    shown = dflow(store, capsys, "status").splitlines()
    assert [line.split()[0] for line in shown[2:-3]] == ["x"]
    assert shown[-3:-1] == ["and 60 cached nodes", "x failed: DataError: x"]


def test_runs_are_listed_the_newest_first(store, capsys):
    first = a_run(store, a=NodeState(state="done", cache="miss"), b=NodeState(state="done", cache="hit"))
    first.state.status, first.state.ended = "done", first.state.started + 90
    first.save()
    second = a_running_run(store, "other")
    rows = json.loads(dflow(store, capsys, "runs", "--json"))["runs"]
    assert [(row["run"], row["pipeline"], row["status"], row["nodes"], row["ran"], row["cached"]) for row in rows] == [
        (second.run, "other", "running", 2, 1, 0),
        (first.run, "toy", "done", 2, 1, 1),
    ]
    assert (rows[1]["seconds"], rows[1]["tags"]) == (90.0, [])
    assert dflow(store, capsys, "runs", "--tag", "best", first.run)
    shown = dflow(store, capsys, "runs").splitlines()
    assert shown[0].split() == ["run", "pipeline", "status", "started", "took", "nodes", "ran", "cached", "tags"]
    assert shown[2].split()[:3] == [first.run, "toy", "done"]
    assert shown[2].split()[-8:] == ["1", "min", "30", "s", "2", "1", "1", "best"]
    assert len(dflow(store, capsys, "runs", "-n", "1").splitlines()) == 2


def test_runs_name_the_draft_that_they_read_and_tau(store, capsys):
    plain = a_run(store, a=NodeState(state="done", cache="miss", metrics={"loss": 1.0}))
    assert "tau" not in dflow(store, capsys, "runs").splitlines()[0]
    done = {"state": "done", "cache": "miss"}
    several = a_run(
        store,
        small=NodeState(**done, metrics={"eval/tau": 2.5}),
        large=NodeState(**done, metrics={"eval/tau": 3.25}),
        gone=NodeState(state="failed", metrics={"eval/tau": 9.0}),
    )
    one = a_run(store, eval=NodeState(**done, metrics={"eval/tau": 2.346}))
    nodes = [
        {"id": "draft", "op": "load_draft", "config": {"source": "/far/away/Qwen3-4B-DFlash"}},
        {"id": "other", "op": "load_draft", "config": {"source": "owner/name"}},
        {"id": "target", "op": "load_target", "config": {"source": "no"}},
    ]
    (one.folder / "graph.json").write_text(json.dumps({"nodes": nodes}))
    rows = {row["run"]: row for row in json.loads(dflow(store, capsys, "runs", "--json"))["runs"]}
    assert ("", {}) == (rows[plain.run]["draft"], rows[plain.run]["tau"])
    assert ("Qwen3-4B-DFlash, owner/name", {"eval": 2.346}) == (rows[one.run]["draft"], rows[one.run]["tau"])
    shown = {line.split()[0]: line for line in dflow(store, capsys, "runs").splitlines()}
    assert ["cached", "draft", "tau", "tags"] == shown["run"].split()[-4:]
    assert shown[one.run].rstrip().endswith("Qwen3-4B-DFlash, owner/name  2.35")
    assert shown[several.run].rstrip().endswith("small 2.50, large 3.25")


def test_the_seconds_of_a_run_leave_out_the_time_between_its_stop_and_its_resumption(store, capsys):
    record = a_run(store, a=NodeState(state="done", cache="miss"))
    record.state.status, record.state.ended = "done", record.state.started + 9000
    record.save()
    times = [(1000, "started"), (1060, "stopped"), (9970, "started"), (10000, "done")]
    lines = [
        json.dumps({"time": time, "node": "", "attempt": 0, "kind": "run", "state": state}) for time, state in times
    ]
    with record.events_path.open("a") as log:
        log.write("\n".join(lines) + "\n")
    assert 90.0 == json.loads(dflow(store, capsys, "runs", "--json"))["runs"][0]["seconds"]


def test_a_running_run_shows_the_cluster_of_its_nodes_and_one_that_is_gone_is_a_line(store, capsys, monkeypatch):
    monkeypatch.setenv("DFLOW_RAY_ADDRESS", "")  # restored, whatever --ray sets
    record = a_running_run(store)
    nodes = [{"id": node_id, "op": "make", "launch": {"kind": "ray"}} for node_id in "ab"]
    write_json(record.folder / "graph.json", {"nodes": nodes, "machine": {"ray": "127.0.0.1:1"}})
    remember_cluster(Machine(ray="127.0.0.1:1"))
    gone = "the Ray cluster 127.0.0.1:1 cannot be reached: nothing answers there"
    assert dflow(store, capsys, "status").splitlines()[-1] == gone
    assert f"run {record.run}: running, " in dflow(store, capsys, "status", "--ray", "local").splitlines()[-1]


def a_done_run(store, *nodes, results_run=None, **state):
    cache = "miss" if results_run is None else "hit"
    record = a_run(store, **{node: NodeState(state="done", cache=cache, key=node, digest="d") for node in nodes})
    record.state.status, record.state.ended, record.state.results_run = "done", 2.0, results_run or record.run
    record.save()
    return record


def test_a_run_in_which_nothing_ran_is_not_the_latest_and_does_not_fill_the_list(store, capsys):
    first = a_done_run(store, "a", "b")
    repeated = a_done_run(store, "a", results_run=first.run)
    assert dflow(store, capsys, "status").splitlines()[-1] == f"run {first.run}: done, 0.0 s"
    shown = dflow(store, capsys, "runs").splitlines()
    assert [line.split()[0] for line in shown[1:-1]] == [first.run]
    assert shown[-1] == "1 run in which nothing ran left out; --all shows all"
    shown = dflow(store, capsys, "runs", "--all").splitlines()
    assert [line.split()[0] for line in shown[1:]] == [repeated.run, first.run]
    assert dflow(store, capsys, "report").strip() == str(first.folder / "report.html")
    dflow(store, capsys, "runs", "--tag", "kept", repeated.run)
    renamed = a_done_run(store, "c", results_run=first.run)  # of nodes that no other run has
    shown = dflow(store, capsys, "runs").splitlines()
    assert [line.split()[0] for line in shown[1:]] == [renamed.run, repeated.run, first.run]
    assert dflow(store, capsys, "status").splitlines()[-1] == f"run {renamed.run}: done, 0.0 s"


def test_of_the_newest_runs_those_in_which_nothing_ran_do_not_count(store, capsys):
    first, second = a_done_run(store, "a"), a_done_run(store, "a")
    a_done_run(store, "a", results_run=first.run)
    rows = json.loads(dflow(store, capsys, "runs", "-n", "1", "--json"))["runs"]
    assert [row["run"] for row in rows] == [second.run]


@pytest.mark.parametrize("state", ["running", "pending", "failed"])  # killed; stopped; its process was killed
def test_of_a_node_that_ended_early_the_last_step_is_shown(store, capsys, state):
    record = a_running_run(store)
    node = record.state.nodes["b"]
    node.state, node.failure = state, Finding("killed by SIGKILL", Node("b")) if state == "failed" else None
    record.save_nodes(["b"])
    record.unlock()
    row = dflow(store, capsys, "status").splitlines()[3]
    why = "killed by SIGKILL; it reached " if state == "failed" else "reached "
    assert row.endswith(f"  {why}2 of 10: loss 0.25")
    rows = json.loads(dflow(store, capsys, "status", "--json"))["nodes"]
    assert rows[1]["progress"] == {"done": 2, "total": 10}


def test_a_newer_smoke_run_is_named_with_the_command_that_shows_it(store, capsys):
    smoke = Store.open(store.path / "smoke", write=True)
    tried = a_done_run(smoke, "a")
    line = f"the latest smoke run is {tried.run} of toy (done): dflow {{}} --store {store.path}/smoke"
    assert cli.main(["status", "--store", str(store.path)]) == 1
    said = capsys.readouterr().err
    assert f"start one with `dflow run --store {store.path} FILE`" in said and said.endswith(
        f"; {line.format('status')}\n"
    )
    assert cli.main(["resume", "--store", str(store.path)]) == 1
    assert capsys.readouterr().err.endswith(f"; {line.format('resume')}\n")
    assert dflow(store, capsys, "runs").splitlines()[-1] == line.format("runs")
    full = a_done_run(store, "a")
    assert "smoke" not in dflow(store, capsys, "runs") + dflow(store, capsys, "status")
    newer = a_done_run(smoke, "a")
    line = line.replace(tried.run, newer.run)
    assert dflow(store, capsys, "status").splitlines()[-2:] == [f"run {full.run}: done, 0.0 s", line.format("status")]
    assert "smoke" not in dflow(store, capsys, "status", full.run)
    assert dflow(smoke, capsys, "status").splitlines()[-1] == f"run {newer.run}: done, 0.0 s"
