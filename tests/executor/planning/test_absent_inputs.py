"""`dflow plan` shows what can be known while data is not there yet; `dflow run` refuses, with every file named."""

from __future__ import annotations

import json

import pytest
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
    assert [told(toy, "a", 8, "first.txt"), told(toy, "b", 12, "second.txt")] == plan["unmet"]


def test_what_reads_from_data_that_is_gone_may_still_be_taken(toy):
    for name in ("first.txt", "second.txt"):
        (toy.folder / name).write_text(name)
    assert 0 == toy.dflow("run", str(toy.file)).returncode
    (toy.folder / "first.txt").unlink()
    plan = json.loads(toy.dflow("plan", str(toy.file), "--json").stdout)
    assert {"a": "miss", "b": "hit", "c": "hit", "d": "maybe"} == {row["id"]: row["cache"] for row in plan["nodes"]}
    drawn = json.loads(toy.dflow("graph", str(toy.file), "--json").stdout)
    assert {"a": "runs", "d": "may be cut off"} == {
        row["id"]: row["state"] for row in drawn["nodes"] if row["id"] in "ad"
    }


def test_an_argument_that_names_nothing_is_told_as_it_was_given(toy):
    (toy.folder / "first.txt").touch()
    plan = json.loads(toy.dflow("plan", str(toy.file), "-s", "b.source=third.txt", "--json").stdout)
    assert [f"-s b.source=third.txt: there is no file or folder {toy.folder / 'third.txt'}"] == plan["unmet"]


def test_copies_of_a_node_are_told_once(toy):
    toy.file.write_text(f'{PIPELINE}\n[for_each.way.one]\na.note = "1"\n[for_each.way.two]\na.note = "2"\n')
    (toy.folder / "second.txt").touch()
    plan = json.loads(toy.dflow("plan", str(toy.file), "--json").stdout)
    assert [told(toy, "a", 8, "first.txt")] == plan["unmet"]


def test_a_pipeline_in_python_is_planned_alike(toy):
    file = toy.folder / "twin.py"
    file.write_text(TWIN)
    plan = json.loads(toy.dflow("plan", str(file), "--json").stdout)
    missing = toy.folder / "first.txt"
    hint = "create it, or give another path: -s a.source=PATH"
    assert [f"node.a.source: there is no file or folder {missing} ({hint})"] == plan["unmet"]
    assert 2 == toy.dflow("run", str(file)).returncode


def test_any_other_mistake_is_refused_with_all_of_them(toy):
    toy.file.write_text(PIPELINE.replace('texts = ["@a", "@c"]', 'texts = ["@a", "@z"]'))
    result = toy.dflow("plan", str(toy.file))
    assert 2 == result.returncode
    assert 'there is no node "z"' in result.stderr
