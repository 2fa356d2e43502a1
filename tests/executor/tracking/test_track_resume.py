"""What MLflow says of a run that failed, was stopped or was killed, and what once it was resumed."""

import signal
import sqlite3
from contextlib import closing

import pytest
from toy_ops import ONE_NODE, PIPELINE, wait_for
from tracked_toy import artifacts, child, client_of, history, ids, newest_record, send, tracked_toy

from dsl.files import read_lines
from executor.records.run_record import Record
from executor.tracking.sync_state import lacks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

LAST = """
[node.e]
op = "upper"
text = "@d"
"""
UNTIL_END = ("-s", "d.steps=100000", "-s", "d.seconds=0.02")  # or until the file `end` is there


def statuses(toy, record):
    """The statuses of the whole run and of every node that has an MLflow run."""
    client = client_of(toy)
    parent, children = ids(record)
    found = {name: client.get_run(run_id).info.status for name, run_id in children.items()}
    return client.get_run(parent).info.status, found


def test_a_node_that_failed_says_why_until_it_succeeded_and_one_that_never_began_has_no_run(tmp_path):
    toy = tracked_toy(tmp_path, PIPELINE + LAST, tracked=False)
    assert toy.dflow("run", str(toy.file), "-s", "d.fail_at=3").returncode == 1
    record = newest_record(toy)
    send(toy, record)
    assert statuses(toy, record) == ("FAILED", {**dict.fromkeys("abc", "FINISHED"), "d": "FAILED"})
    failed = child(toy, record, "d")
    assert failed.data.tags["dflow.error"] == "DataError: line 3 of the data is broken"
    assert artifacts(client_of(toy), failed.info.run_id) == ["d.log"]
    log = toy.store / "mlartifacts" / failed.info.run_id / "artifacts" / "d.log"
    assert "about to fail" in log.read_text()
    (tmp_path / "end").touch()
    assert toy.dflow("resume").returncode == 0
    assert newest_record(toy) == record
    send(toy, record)
    assert statuses(toy, record) == ("FINISHED", dict.fromkeys("abcde", "FINISHED"))
    finished = child(toy, record, "d")
    assert finished.info.run_id == failed.info.run_id
    assert "dflow.error" not in finished.data.tags
    assert finished.data.tags["dflow.attempts"] == "2"


def test_a_run_that_was_stopped_is_killed_in_the_words_of_mlflow_and_runs_again_once_resumed(tmp_path):
    toy = tracked_toy(tmp_path, PIPELINE + LAST, tracked=False)
    process = toy.start("run", str(toy.file), *UNTIL_END)
    wait_for(lambda: len(toy.steps()) > 2, seconds=60)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    record = newest_record(toy)
    done = dict.fromkeys("abc", "FINISHED")
    send(toy, record)
    assert statuses(toy, record) == ("KILLED", {**done, "d": "KILLED"})
    stopped = ids(record)
    process = toy.start("resume")
    wait_for(lambda: toy.state()["nodes"]["d"]["state"] == "running", seconds=60)
    send(toy, record, is_live=True)
    assert statuses(toy, record) == ("RUNNING", {**done, "d": "RUNNING"})
    (tmp_path / "end").touch()
    process.communicate(timeout=300)
    send(toy, record)
    assert statuses(toy, record) == ("FINISHED", dict.fromkeys("abcde", "FINISHED"))
    assert (ids(record)[0], ids(record)[1]["d"]) == (stopped[0], stopped[1]["d"])
    assert "dflow.error" not in child(toy, record, "d").data.tags


def test_what_was_not_sent_before_the_executor_died_is_sent_on_resume(tmp_path):
    toy = tracked_toy(tmp_path, ONE_NODE, tracked=False)
    assert toy.dflow("run", str(toy.file)).returncode == 0
    record = newest_record(toy)
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
    assert statuses(toy, record) == ("FINISHED", {"a": "FINISHED"})
    assert not lacks(Record.load(record))


def test_after_a_kill_in_the_middle_mlflow_holds_every_run_and_point_once(tmp_path):
    toy = tracked_toy(tmp_path)
    process = toy.start("run", str(toy.file), *UNTIL_END)
    wait_for(lambda: "steps/loss" in logged(toy), seconds=60)
    record = newest_record(toy)
    process.kill()
    process.communicate()
    killed = ids(record)[1]["d"]
    reached = len(read_lines(record / "events.jsonl"))
    process = toy.start("resume")
    wait_for(lambda: len(read_lines(record / "events.jsonl")) > reached + 40, seconds=60)
    (tmp_path / "end").touch()
    process.communicate(timeout=300)
    assert process.returncode == 0
    client = client_of(toy)
    runs = client.search_runs(["1"])
    assert sorted(run.data.tags.get("dflow.node", "parent") for run in runs) == ["a", "b", "c", "d", "parent"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert ids(record)[1]["d"] == killed
    found = [step for step, _, _ in history(client, killed, "steps/loss")]
    assert found == list(range(len(found)))
    tags = client.get_run(killed).data.tags
    assert (tags["dflow.cache"], tags["dflow.attempts"]) == ("resumed", "2")


def logged(toy):
    """The metrics that MLflow holds already."""
    with closing(sqlite3.connect(f"file:{toy.store / 'mlflow.db'}?mode=ro", uri=True)) as database:
        return {row[0] for row in database.execute("SELECT DISTINCT key FROM metrics")}
