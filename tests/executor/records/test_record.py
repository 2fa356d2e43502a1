"""Records, events and the files of lines that they are made of."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest
from manifests import new_record
from toy_ops import Toy

from dsl.errors import StoreError
from dsl.files import LineReader, append_line, read_lines
from dsl.finding import Finding, Node
from dsl.graph import Graph
from dsl.read_toml import read_graph
from executor.planning.session import new_run, resumed_run
from executor.records.events import Cut, Event, Metric, final_metrics, read_events, valid_points
from executor.records.run_record import LOG, OLDER_STATE, NodeState, Record, RunState, find_record, newest_records
from executor.store.artifact_store import Store
from executor.system import file_locks


def a_graph(name="p"):
    return Graph(name, 0, name, None, Path("/"), (), {})


def metric(step, attempt=1, **metrics):
    return Event(1.5, "train", attempt, Metric(step, metrics))


def test_an_event_is_this_line(tmp_path):
    append_line(tmp_path / "events.jsonl", metric(3, **{"train/loss": 0.5}).to_json())
    assert (tmp_path / "events.jsonl").read_text() == (
        '{"time":1.5,"node":"train","attempt":1,"kind":"metric","step":3,"metrics":{"train/loss":0.5}}\n'
    )


def test_a_torn_last_line_is_left_for_later_and_ended_by_the_next_writer(tmp_path):
    path = tmp_path / "lines"
    append_line(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"a": 2')
    reader = LineReader(path)
    assert reader.read() == [{"a": 1}]
    append_line(path, {"a": 3})
    assert reader.read() == [{"a": 3}]
    assert read_lines(path) == [{"a": 1}, {"a": 3}]


def test_a_file_that_is_not_there_has_no_lines(tmp_path):
    assert read_lines(tmp_path / "nothing") == []


def test_a_cut_takes_back_what_earlier_attempts_logged_from_that_step_on():
    events = [metric(0, x=1.0), metric(1, x=2.0), metric(2, x=3.0)]
    cut = Event(2.0, "train", 2, Cut(1))
    again = [metric(1, 2, x=20.0), metric(2, 2, x=30.0)]
    assert valid_points([*events, cut, *again]) == [events[0].body, *(event.body for event in again)]


def test_final_metrics_are_the_last_of_each_name(tmp_path):
    path = tmp_path / "events.jsonl"
    cut, other = Event(2.0, "train", 2, Cut(1)), Event(1.5, "other", 1, Metric(9, {"x": 9.0}))
    for event in (metric(0, x=1.0, y=5.0), metric(1, x=2.0, gone=1.0), cut, other, metric(1, 2, x=3.0)):
        append_line(path, event.to_json())
    assert final_metrics(path, "train") == {"x": 3.0, "y": 5.0}


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "metric", "step": "3", "metrics": {}},
        {"kind": "metric", "step": 3, "metrics": {"loss": "low"}},
        {"kind": "metric", "metrics": {}},
        {"kind": "progress", "done": 1},
        {"kind": "newer"},
        {"kind": ["metric"], "step": 3, "metrics": {}},
        {"kind": "cut", "step": 1, "node": None},
        {"kind": "cut", "step": 1, "time": "now"},
    ],
)
def test_a_line_that_is_no_event_is_passed_over(tmp_path, line):
    path = tmp_path / "events.jsonl"
    for each in ({"time": 1.5, "node": "train", "attempt": 1, **line}, metric(4, x=2).to_json()):
        append_line(path, each)
    assert read_events(path) == [metric(4, x=2)]


def test_ids_sort_by_time_and_never_meet(tmp_path):
    runs = [new_record(tmp_path, a_graph()).run for _ in range(20)]
    assert runs == sorted(set(runs))


def test_a_record_is_read_back_as_it_was_written(tmp_path):
    record = new_record(tmp_path, a_graph(), pinned={"a": "d1"}, forced=["b"])
    record.state.nodes["b"] = NodeState(
        state="failed", failure=Finding("DataError: x", Node("b"), "fix x", code="data"), attempt=2, metrics={"x": 1.0}
    )
    record.save_node("b")
    assert Record.load(record.folder).state == record.state
    assert record.graph() == a_graph()


def test_a_run_is_found_by_a_part_of_its_id(tmp_path):
    first, second = new_record(tmp_path, a_graph("p")), new_record(tmp_path, a_graph("q"))
    assert find_record(tmp_path, None).run == second.run
    assert find_record(tmp_path, first.run[-4:]).run == first.run
    assert [record.run for record in newest_records(tmp_path, "p")] == [first.run]
    with pytest.raises(StoreError, match='"2" fits several runs'):
        find_record(tmp_path, "2")
    with pytest.raises(StoreError, match='"x" is no run of this store; runs: 2'):
        find_record(tmp_path, "x")


def test_the_middle_of_an_id_will_do_where_no_id_begins_or_ends_so(tmp_path):
    for run in ("20261121-183012-ab12", "20261122-101530-2018"):
        record = new_record(tmp_path, a_graph())
        record.state.run = run
        record.save()
        record.folder.rename(tmp_path / run)
    assert find_record(tmp_path, "1530").run == "20261122-101530-2018"
    assert find_record(tmp_path, "2018").run == "20261122-101530-2018"
    with pytest.raises(StoreError, match='"-1" fits several runs'):
        find_record(tmp_path, "-1")


def test_the_newest_line_of_a_node_counts_and_a_torn_one_does_not(tmp_path):
    record = new_record(tmp_path, a_graph())
    for attempt in (1, 2):
        record.state.nodes["a"] = NodeState(state="running", attempt=attempt)
        record.save_node("a")
    with (record.folder / LOG).open("a") as file:
        file.write('{"kind":"state","node":"a","attempt":3')
    assert Record.load(record.folder).state.nodes == {"a": NodeState(state="running", attempt=2)}
    record.state.nodes["a"].attempt = 4
    record.save_node("a")
    assert Record.load(record.folder).state.nodes["a"].attempt == 4


def test_what_a_newer_dflow_writes_beside_is_not_read(tmp_path):
    record = new_record(tmp_path, a_graph())
    append_line(record.folder / LOG, {"kind": "state", "node": "a", "state": "done", "colour": "red"})
    append_line(
        record.folder / LOG, {"kind": "run", "node": "", "state": "done", "pipeline": "p", "experiment": "e", "mood": 1}
    )
    append_line(record.folder / LOG, {"weather": "rain"})
    state = Record.load(record.folder).state
    assert state == RunState(run=record.run, pipeline="p", experiment="e", nodes={"a": NodeState(state="done")})


def test_the_state_of_an_older_version_counts_and_becomes_part_of_the_log_when_it_is_written_to(tmp_path):
    record = new_record(tmp_path, a_graph())
    (record.folder / LOG).write_text(
        '{"time":5.0,"node":"","attempt":0,"kind":"run","state":"started"}\n'
        '{"time":6.0,"node":"a","attempt":1,"kind":"state","state":"running","cache":"miss","key":"k"}\n'
        '{"time":8.0,"node":"a","attempt":1,"kind":"state","state":"done","digest":"d","seconds":2.0}\n'
    )
    (record.folder / OLDER_STATE).write_text(
        '{"run":{"run":"x","pipeline":"p","experiment":"e","started":4.0}}\n{"node":"a"}\n{"node":"b"}\n'
        '{"node":"a","state":"done","cache":"miss","key":"k","digest":"d","reason":"new","attempt":1}\n'
    )
    older = Record.load(record.folder)
    done = NodeState(state="done", cache="miss", key="k", digest="d", reason="new", attempt=1)
    assert {"a": done, "b": NodeState()} == older.state.nodes
    assert ("p", 4.0, "killed") == (older.state.pipeline, older.state.started, older.status())
    older.save_node("b")
    assert not (record.folder / OLDER_STATE).exists()
    assert older.state == Record.load(record.folder).state
    assert 3.0 == older.seconds(), "what was written now is no work"


def test_ids_sort_after_all_that_are_there_though_the_clock_went_back(tmp_path):
    for there in ("20991231-235959-00ff", "20991231-235959-ffff", "99991231-235959-ffff0f", "no-run"):
        (tmp_path / there).mkdir()
        run = new_record(tmp_path, a_graph()).run
        assert run == max(path.name for path in tmp_path.iterdir() if path.name != "no-run")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name > "2099") == [
        "20991231-235959-00ff",
        "20991231-235959-0100",
        "20991231-235959-ffff",
        "20991231-235959-ffff0",
        "99991231-235959-ffff0f",
        "99991231-235959-ffff10",
        "99991231-235959-ffff11",
        "no-run",
    ]


def test_a_record_whose_folder_is_gone_says_so(tmp_path):
    record = new_record(tmp_path, a_graph())
    record.lock()
    shutil.rmtree(record.folder)
    for write in (record.save, record.save_all, lambda: record.write_events([metric(1, x=1)])):
        with pytest.raises(StoreError, match="its folder is gone; was it removed while a run used it"):
            write()


def test_of_a_state_that_was_half_written_the_rest_is_pending(tmp_path):
    toy = Toy(tmp_path)
    store = Store.open(toy.store, write=True)
    record = new_run(store, read_graph(toy.file)).record
    record.unlock()
    lines = (record.folder / LOG).read_text().splitlines(keepends=True)
    for kept, known in (("".join(lines[:2]) + '{"kind":"state","no', ["a"]), ("".join(lines[:3]), ["a", "b"])):
        (record.folder / LOG).write_text(kept)
        assert list(find_record(store.records, None).state.nodes) == known
    resumed = resumed_run(store, None, []).record
    assert {node_id: node.state for node_id, node in resumed.state.nodes.items()} == dict.fromkeys("abcd", "pending")
    resumed.unlock()
    (record.folder / LOG).write_text(lines[0][:20])
    with pytest.raises(StoreError, match="the store holds no run yet"):
        find_record(store.records, None)


def test_an_empty_store_has_no_run(tmp_path):
    with pytest.raises(StoreError, match="the store holds no run yet; start one with `dflow run FILE`"):
        find_record(tmp_path / "records", None)
    with pytest.raises(StoreError, match="Runs of a file elsewhere are in `runs` of that file's project: name it with"):
        find_record(tmp_path / "records", None)


def test_two_processes_never_work_on_one_run(tmp_path):
    record = new_record(tmp_path, a_graph())
    assert record.is_alive() is False
    record.lock()
    assert record.is_alive() is True
    with pytest.raises(StoreError, match="is still running"):
        Record.load(record.folder).lock()
    record.unlock()
    Record.load(record.folder).lock()


def test_who_only_asks_whether_a_run_is_alive_keeps_nobody_out(tmp_path, monkeypatch):
    record = new_record(tmp_path, a_graph())
    asking = os.open(record.folder / "lock", os.O_RDONLY | os.O_CREAT)
    fcntl.flock(asking, fcntl.LOCK_SH)
    monkeypatch.setattr(file_locks.time, "sleep", lambda seconds: os.close(asking))
    record.lock()
    assert record.is_alive()
    record.unlock()


def test_a_half_written_record_is_passed_over(tmp_path):
    record = new_record(tmp_path, a_graph())
    (tmp_path / "99999999-000000-0000").mkdir()
    with pytest.raises(StoreError, match=r"99999999-000000-0000: the record of this run is incomplete"):
        find_record(tmp_path, "99999999")
    assert find_record(tmp_path, None).run == record.run
