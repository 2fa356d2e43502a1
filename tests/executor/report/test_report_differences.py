"""What a report says of the causes of a difference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from report_page import Page
from toy_ops import PIPELINE, Toy

from executor.explain.run_diff import NodeDiff
from executor.keys.differences import Difference, Kind
from executor.report.comparison import line_of

NONE = "\u2013"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("setting", "x", 8, 1), "no part of the key differs; settings that are not part of the key: x"),
        (("setting", "x", "@a", "@b"), "what differs: x"),
        (("setting", "x", ["@a"], ["@b"]), "what differs: x"),
        (("value", "x", 1, 2), "what differs: x"),
        (("config", "x", 1, 2), "what differs: x"),
    ],
)
def test_a_report_names_as_a_cause_what_may_have_made_another_artifact(
    change: tuple[Kind, str, Any, Any], expected: str
) -> None:
    kind, _, old, new = change
    diff = NodeDiff("eval", "both", ("1" * 64, "2" * 64), values=(Difference(kind, "x", old, new),))
    assert f"eval: another artifact ({'1' * 12}, {'2' * 12}); {expected}" == line_of(diff, "one", "other")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Toy, dict[str, str]]:
    """By name: the pipeline, two with other values, and one without its last node."""
    toy = Toy(tmp_path_factory.mktemp("toy"))
    short = toy.folder / "short.toml"
    short.write_text(PIPELINE[: PIPELINE.index("[node.d]")])
    ran = {}
    for name, arguments in {
        "first": (toy.file,),
        "second": (toy.file, "-s", "d.steps=7", "-s", "c.weight=3.0"),
        "third": (toy.file, "-s", "d.steps=8", "-s", "c.weight=3.0"),
        "short": (short,),
    }.items():
        result = toy.dflow("run", *map(str, arguments))
        assert 0 == result.returncode, result.stderr
        ran[name] = toy.state()["run"]
    return toy, ran


def page_of(toy: Toy, *runs: str) -> Page:
    result = toy.dflow("report", *runs)
    assert 0 == result.returncode, result.stderr
    return Page.read(Path(result.stdout.strip()))


@pytest.mark.parametrize(
    ("order", "weights", "steps"),
    [
        (("first", "second", "short"), ["1.0", "3.0", "1.0"], ["5", "7", NONE]),
        (("short", "first", "second"), ["1.0", "1.0", "3.0"], [NONE, "5", "7"]),
        (("short", "second", "third"), ["1.0", "3.0", "3.0"], [NONE, "7", "8"]),
    ],
)
def test_a_run_that_lacks_a_node_has_none_of_its_values_and_the_others_are_compared_with_each_other(
    runs: tuple[Toy, dict[str, str]], order: tuple[str, ...], weights: list[str], steps: list[str]
) -> None:
    toy, ran = runs
    page = page_of(toy, *(ran[name] for name in order))
    [rows] = page.tables["differences"]
    assert [["c", "weight", *weights], ["d", "steps", *steps]] == rows[1:]
    with_node = [ran[name].rpartition("-")[2] for name in order if name != "short"]
    told = page.text("differences")
    assert f"{with_node[1]} against {with_node[0]}" in " ".join(told.split())
    assert 1 == told.count("d: another artifact")
    assert any(f"d: only in {label}" in told for label in with_node)


def test_values_are_compared_also_where_what_the_key_saw_is_gone(runs: tuple[Toy, dict[str, str]]) -> None:
    toy, ran = runs
    store = toy.folder / "copy"
    shutil.copytree(toy.store, store)
    assert 0 == toy.dflow("rm", ran["second"], "--yes", "--store", str(store)).returncode
    told = json.loads(toy.dflow("diff", ran["first"], ran["third"], "--json", "--store", str(store)).stdout)["nodes"]
    [node] = [node for node in told if node["node"] == "c"]
    assert [{"kind": "value", "name": "weight", "old": 1.0, "new": 3.0}] == node["changes"]
    assert (["second"], []) == (node["unknown"], told[-1]["unknown"])
    text = toy.dflow("diff", ran["first"], ran["third"], "--store", str(store)).stdout
    assert "  value changed: c.weight from 1.0 to 3.0\n  code and libraries: not compared" in text
    page = page_of(toy, ran["first"], ran["third"], "--store", str(store))
    assert ["c", "weight (value)", "1.0", "3.0"] in page.tables["differences"][0]
    assert "code and libraries are not compared" in page.text("differences")
