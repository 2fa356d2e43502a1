"""What a report says of the causes of a difference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from report_page import Page
from toy_ops import PIPELINE, Toy

from executor.system.trust import trust_store


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Toy, dict[str, str]]:
    """Runs by name: the pipeline, two with other values, and one without its last node."""
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


def test_each_of_several_runs_is_compared_with_the_first(runs: tuple[Toy, dict[str, str]]) -> None:
    toy, ran = runs
    page = page_of(toy, ran["first"], ran["second"], ran["short"])
    labels = {name: run.rpartition("-")[2] for name, run in ran.items()}
    told = page.text("differences")
    of_second, of_short = told.split(f"{labels['short']} against {labels['first']}")
    assert f"{labels['second']} against {labels['first']}" in of_second
    assert "c.weight from 1.0 to 3.0" in of_second and "d.steps from 5 to 7" in of_second
    assert "only in the first" in of_short and "c.weight" not in of_short


def test_values_are_compared_also_where_what_the_key_saw_is_gone(runs: tuple[Toy, dict[str, str]]) -> None:
    toy, ran = runs
    store = toy.folder / "copy"
    shutil.copytree(toy.store, store)
    trust_store(store)
    assert 0 == toy.dflow("rm", ran["second"], "--yes", "--store", str(store)).returncode
    found = json.loads(toy.dflow("diff", ran["first"], ran["third"], "--json", "--store", str(store)).stdout)["nodes"]
    [node] = [node for node in found if node["node"] == "c"]
    assert [{"kind": "value", "name": "weight", "old": 1.0, "new": 3.0}] == node["changes"]
    assert (["second"], []) == (node["unknown"], found[-1]["unknown"])
    text = toy.dflow("diff", ran["first"], ran["third"], "--store", str(store)).stdout
    assert "  value changed: c.weight from 1.0 to 3.0\n  code and libraries: not compared" in text
    page = page_of(toy, ran["first"], ran["third"], "--store", str(store))
    told = page.text("differences")
    assert "value changed: c.weight from 1.0 to 3.0" in told and "code and libraries: not compared" in told
