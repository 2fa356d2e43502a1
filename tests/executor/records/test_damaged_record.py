"""A record that is damaged, moved with its project, or finished in part: what commands make of it."""

from __future__ import annotations

import shutil

import pytest
from imitated_runs import begin, dflow, edit, ended, execute, run, toy_pipeline
from toy_ops import Toy

from dsl.errors import NotTrusted
from executor.planning.session import run_from
from executor.records.run_record import Record
from executor.records.run_tags import add_tag
from executor.store.artifact_store import Store
from executor.system.trust import trust_store


@pytest.fixture
def toy(tmp_path):
    return toy_pipeline(tmp_path / "mine")


@pytest.mark.parametrize(
    ("file", "text", "command"),
    [
        ("graph.json", "{", ["diff", "RUN"]),
        ("graph.json", "{}", ["resume", "RUN"]),
        ("graph.json", "[]", ["sync", "RUN"]),
        ("graph.json", "{", ["status", "RUN", "--json"]),
        ("graph.json", '{"nodes": [1]}', ["diff", "RUN"]),
        ("plan.json", "{", ["resume", "RUN"]),
        ("plan.json", "[1]", ["diff", "RUN"]),
        ("events.jsonl", '{"kind":"run","node":"","pipeline":1}\n', ["status", "RUN"]),
    ],
)
def test_a_damaged_record_is_one_line_that_says_what_to_do(toy, capsys, file, text, command):
    record = run(toy, fail_at="d")
    run(toy)
    edit(record.folder / file, text)
    capsys.readouterr()
    assert dflow(toy, *(record.run if word == "RUN" else word for word in command)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{record.folder / file}" in line
    assert f"dflow rm {record.run}" in line


@pytest.mark.parametrize("file", ["graph.json", "plan.json", "mlflow.json"])
def test_a_damaged_record_is_not_in_the_way_of_others(toy, file):
    record = run(toy)
    edit(record.folder / file, "{") if (record.folder / file).exists() else (record.folder / file).write_text("{")
    assert dflow(toy, "plan", str(toy.file), "-s", "a.text=x") == 0
    assert dflow(toy, "gc") == 0
    assert dflow(toy, "status", record.run) == 0


@pytest.mark.parametrize("text", ["garbage", '{"kind":"run","node":"","pipeline":1}\n', "[]"])
def test_a_run_takes_what_one_made_whose_record_is_damaged(toy, text):
    maker = run(toy)
    edit(maker.folder / "events.jsonl", text)
    taking = execute(begin(toy, "d.steps=3"))
    assert ["a", "b", "c"] == [node_id for node_id, node in taking.state.nodes.items() if node.cache == "hit"]
    assert maker.run == taking.state.nodes["a"].source_run
    assert dflow(toy, "plan", str(toy.file), "--why", "a") == 0
    assert dflow(toy, "report", taking.run) == 0


def test_sync_goes_on_behind_a_run_that_cannot_be_read(toy):
    broken = execute(begin(toy, "a.text=x"))
    whole = run(toy)
    for record in (broken, whole):
        for node in record.state.nodes.values():
            node.cache = "miss"
        record.save_all()
    edit(broken.folder / "graph.json", "{")
    result = toy.dflow("sync")
    assert result.returncode == 1
    assert f"run {broken.run} cannot be read, so it is not sent" in result.stderr
    assert f"run {whole.run}: sent 5 runs" in result.stdout


def test_a_project_that_was_moved_goes_on(toy, tmp_path):
    record = run(toy, fail_at="d")
    toy.folder.rename(tmp_path / "elsewhere")
    moved = Record.load(tmp_path / "elsewhere" / toy.store.relative_to(toy.folder) / "records" / record.run)
    with pytest.raises(NotTrusted, match="not one that you made here, at this place"):
        moved.graph()
    trust_store(moved.folder.parents[1])
    graph = moved.graph()
    assert graph.root == tmp_path / "elsewhere"
    assert graph.op_files == (tmp_path / "elsewhere" / "toy.py",)


def test_a_copy_of_a_project_is_resumed_though_the_first_lies_on_the_path(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    toy = Toy(tmp_path / "mine")
    assert toy.dflow("run", str(toy.file), "-s", "d.fail_at=1").returncode == 1
    shutil.copytree(toy.folder, tmp_path / "copy")
    copy = Toy(tmp_path / "copy")
    monkeypatch.setenv("PYTHONPATH", str(toy.folder))
    copied = copy.dflow("resume", "-s", "d.fail_at=-1")
    assert copied.returncode == 0, copied.stderr


def test_what_was_not_finished_beside_what_runs_anew_runs_too(toy):
    """Node x reads from no other one."""
    toy.file.write_text(toy.file.read_text() + '\n[node.x]\nop = "join"\ntexts = ["@a"]\n')
    session = begin(toy, "d.steps=3")
    record = session.record
    execute(session, fail_at="x")
    assert record.state.nodes["x"].digest is None
    session = run_from(Store.open(toy.store, write=True), record.run, ["d"], [])
    assert {node_id: each.cache for node_id, each in session.decisions.items()} == {
        "a": "hit", "b": "hit", "c": "hit", "d": "miss", "x": "miss"
    }  # fmt: skip
    ended(session.record, "stopped")


def test_a_tagged_run_is_refused_before_anybody_is_asked(toy, capsys):
    record = run(toy)
    add_tag(record.folder, "best")
    assert dflow(toy, "rm", "best") == 1
    assert f"run {record.run} is tagged best" in capsys.readouterr().err


def test_a_run_that_is_not_there_is_told_with_the_runs_and_tags_that_are(toy, capsys):
    record = run(toy)
    add_tag(record.folder, "best")
    assert dflow(toy, "resume", "bset") == 2
    assert f"runs: {record.run} (best)" in capsys.readouterr().err
    assert dflow(toy, "resume", "pipeline.toml") == 2
    assert "to run a pipeline: dflow run pipeline.toml" in capsys.readouterr().err


def test_a_field_that_is_swept_twice_is_a_mistake(toy, capsys):
    assert dflow(toy, "plan", str(toy.file), "--sweep", "c.weight=[1.0]", "--sweep", "c.weight=[2.0]") == 2
    assert "c.weight is swept twice" in capsys.readouterr().err
