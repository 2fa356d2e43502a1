"""`dflow plan` shows what can be known while data is not there yet; `dflow run` refuses, with every file named."""

from __future__ import annotations

import json
import shutil

import pytest
from PIL import Image
from toy_ops import Toy

PIPELINE = """
[pipeline]
name = "absent"
ops = ["toy.py"]

[node.a]
op = "make"
source = "first.txt"

[node.b]
op = "make"
source = "second.txt"

[node.c]
op = "make"

[node.d]
op = "join"
texts = ["@a", "@c"]
"""
TWIN = """
from pathlib import Path
from dsl.pipeline import Pipeline
from toy import Make

def pipeline():
    p = Pipeline("absent", op_files=("toy.py",))
    p.node("a", Make(source="first.txt"))
    p.node("c", Make())
    return p
"""


@pytest.fixture
def toy(tmp_path):
    return Toy(tmp_path, PIPELINE)


def told(toy, node_id, line, name):
    hint = f"create it, or give another path: -s {node_id}.source=PATH"
    return f"{toy.file}:{line}:1: node.{node_id}.source: there is no file or folder {toy.folder / name} ({hint})"


def test_a_run_names_every_file_that_is_not_there(toy):
    result = toy.dflow("run", str(toy.file))
    assert 2 == result.returncode
    assert [told(toy, "a", 8, "first.txt"), told(toy, "b", 12, "second.txt")] == result.stderr.splitlines()
    assert [] == list(toy.store.glob("records/*"))


def test_a_plan_is_made_all_the_same_and_lists_them_below_its_table(toy):
    result = toy.dflow("plan", str(toy.file))
    assert (2, "") == (result.returncode, result.stderr)
    lines = [told(toy, "a", 8, "first.txt"), told(toy, "b", 12, "second.txt")]
    assert ["missing or wrong, so `dflow run` would refuse to start:", *lines] == result.stdout.splitlines()[-3:]


def test_the_keys_that_hang_on_them_are_unknown_and_the_others_stand(toy):
    plan = json.loads(toy.dflow("plan", str(toy.file), "--json").stdout)
    rows = {row["id"]: row for row in plan["nodes"]}
    assert {"a": None, "b": None, "d": None} == {node_id: rows[node_id]["key"] for node_id in "abd"}
    assert rows["c"]["key"] is not None
    absent = "its data is missing"
    assert {"a": absent, "b": absent, "c": "new", "d": "new"} == {name: row["reason"] for name, row in rows.items()}
    assert [told(toy, "a", 8, "first.txt"), told(toy, "b", 12, "second.txt")] == plan["missing_here"]


@pytest.fixture
def gone(toy):
    """A run that was made, whose raw data of node a is deleted; and its id."""
    for name in ("first.txt", "second.txt"):
        (toy.folder / name).write_text(name)
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    (toy.folder / "first.txt").unlink()
    toy.made = toy.state()["run"]
    toy.calls()
    return toy


def kept(toy):
    return f"its data is not there any more; its artifact is kept as run {toy.made} recorded it"


def test_what_was_made_of_data_that_is_gone_is_taken_from_the_store_and_said_so(gone):
    plan = json.loads(gone.dflow("plan", str(gone.file), "--json").stdout)
    assert {"a": "hit", "b": "hit", "c": "hit", "d": "hit"} == {row["id"]: row["cache"] for row in plan["nodes"]}
    assert {"a": kept(gone), "b": "", "c": "", "d": ""} == {row["id"]: row["reason"] for row in plan["nodes"]}
    assert [] == plan["missing_here"]
    drawn = json.loads(gone.dflow("graph", str(gone.file), "--json").stdout)
    assert {"a": "cached", "d": "cached"} == {row["id"]: row["state"] for row in drawn["nodes"] if row["id"] in "ad"}


def test_a_node_below_data_that_is_gone_runs_with_other_values(gone):
    result = gone.dflow("run", str(gone.file), "--only", "d", "-s", "d.between=+")
    assert (0, "") == (result.returncode, result.stderr)
    assert f"a: {kept(gone)}" in result.stdout.splitlines()
    assert ["join"] == gone.calls()
    assert "first.txt+a" == gone.text("d")


def test_a_run_is_rerun_from_a_node_below_data_that_is_gone(gone):
    result = gone.dflow("resume", "--from", "d", "-s", "d.between=+")
    assert (0, "") == (result.returncode, result.stderr)
    assert f"a: {kept(gone)}" in result.stdout.splitlines()
    assert ["join"] == gone.calls()
    assert "first.txt+a" == gone.text("d")


def test_nothing_starts_at_a_node_whose_own_data_is_gone(gone):
    result = gone.dflow("resume", "--from", "a", "-s", "d.between=+")
    assert 2 == result.returncode
    assert f"there is no file or folder {gone.folder / 'first.txt'}" in result.stderr
    assert [] == gone.calls()


def test_an_artifact_of_other_values_or_another_path_is_never_taken_for_data_that_is_gone(gone):
    other = gone.dflow("run", str(gone.file), "-s", "a.text=other")
    assert 2 == other.returncode
    where = 'node.a: its artifact in the store is another one: config changed: a.text from "a" to "other"'
    assert where in other.stderr.splitlines()[1], other.stderr
    elsewhere = gone.dflow("run", str(gone.file), "-s", "a.source=elsewhere.txt")
    assert [f"-s a.source=elsewhere.txt: there is no file or folder {gone.folder / 'elsewhere.txt'}"] == (
        elsewhere.stderr.splitlines()
    )


def test_the_newest_state_of_data_that_is_gone_counts_not_one_before_it(gone):
    (gone.folder / "first.txt").write_text("newer")
    assert 0 == gone.dflow("run", str(gone.file), "-s", "a.text=other").returncode
    (gone.folder / "first.txt").unlink()
    result = gone.dflow("run", str(gone.file))
    assert 2 == result.returncode
    assert "its artifact in the store is another one" in result.stderr


def test_samples_whose_rows_and_images_are_gone_are_kept(tmp_path):
    toy = Toy(tmp_path, '[pipeline]\nname = "rows"\n[node.ingest]\nop = "ingest"\nsource = "raw/rows.jsonl"\n')
    (tmp_path / "raw").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "raw" / "red.png")
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "Red."}]
    (tmp_path / "raw" / "rows.jsonl").write_text(json.dumps({"messages": turns, "images": ["red.png"]}) + "\n")
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    toy.made = toy.state()["run"]
    shutil.rmtree(tmp_path / "raw")
    result = toy.dflow("run", str(toy.file))
    assert (0, "") == (result.returncode, result.stderr)
    assert [f"ingest: {kept(toy)}", "nothing to do: the only node is cached"] == result.stdout.splitlines()[:2]
    other = toy.dflow("plan", str(toy.file), "-s", "ingest.format=json")
    assert "its data is missing" in other.stdout.splitlines()[1]


def test_an_explanation_of_a_node_whose_data_is_gone_says_why_it_is_cached(gone):
    result = gone.dflow("explain", str(gone.file), "a", "--json")
    assert ("hit", kept(gone)) == tuple(json.loads(result.stdout)[name] for name in ("cache", "reason"))


def test_missing_data_of_nodes_that_are_not_selected_stops_no_run(toy):
    result = toy.dflow("run", str(toy.file), "--to", "c")
    assert (0, "") == (result.returncode, result.stderr)
    assert ["make"] == toy.calls()


def test_an_argument_that_names_nothing_is_told_as_it_was_given(toy):
    (toy.folder / "first.txt").touch()
    plan = json.loads(toy.dflow("plan", str(toy.file), "-s", "b.source=third.txt", "--json").stdout)
    assert [f"-s b.source=third.txt: there is no file or folder {toy.folder / 'third.txt'}"] == plan["missing_here"]


def test_copies_of_a_node_are_told_once(toy):
    toy.file.write_text(f'{PIPELINE}\n[for_each.way.one]\na.note = "1"\n[for_each.way.two]\na.note = "2"\n')
    (toy.folder / "second.txt").touch()
    plan = json.loads(toy.dflow("plan", str(toy.file), "--json").stdout)
    assert [told(toy, "a", 8, "first.txt")] == plan["missing_here"]


def test_a_pipeline_in_python_is_planned_alike(toy):
    file = toy.folder / "twin.py"
    file.write_text(TWIN)
    plan = json.loads(toy.dflow("plan", str(file), "--json").stdout)
    missing = toy.folder / "first.txt"
    hint = "create it, or give another path: -s a.source=PATH"
    assert [f"node.a.source: there is no file or folder {missing} ({hint})"] == plan["missing_here"]
    assert 2 == toy.dflow("run", str(file)).returncode


def test_any_other_mistake_is_refused_with_all_of_them(toy):
    toy.file.write_text(PIPELINE.replace('texts = ["@a", "@c"]', 'texts = ["@a", "@z"]'))
    result = toy.dflow("plan", str(toy.file))
    assert 2 == result.returncode
    first, third, second = result.stderr.splitlines()
    assert [told(toy, "a", 8, "first.txt"), told(toy, "b", 12, "second.txt")] == [first, third]
    assert 'there is no node "z"' in second
