"""`dflow diff` where a run is a sweep: each copy is compared with the node that it is a copy of."""

from __future__ import annotations

import json

import pytest
from toy_ops import Toy

SWEEPS = {"plain": (), "swept": ("--sweep", "c.weight=[2.0,3.0]"), "other": ("--sweep", "c.weight=[3.0,4.0]")}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Toy, dict[str, str]]:
    toy = Toy(tmp_path_factory.mktemp("toy"))
    runs = {}
    for name, arguments in SWEEPS.items():
        result = toy.dflow("run", str(toy.file), *arguments)
        assert 0 == result.returncode, result.stderr
        runs[name] = toy.state()["run"]
    return toy, runs


@pytest.mark.parametrize("is_second", [True, False])
def test_the_copies_of_each_combination_are_compared_with_what_they_are_copies_of(
    swept: tuple[Toy, dict[str, str]], is_second: bool
) -> None:
    toy, runs = swept
    asked = [runs["plain"], runs["swept"]][:: 1 if is_second else -1]
    told = json.loads(toy.dflow("diff", *asked, "--json").stdout)
    assert [("a", "both"), ("b", "both")] == [(node["node"], node["in"]) for node in told["nodes"]]
    assert [{"c.weight": "2.0"}, {"c.weight": "3.0"}] == [each["values"] for each in told["combinations"]]
    for combination, weight in zip(told["combinations"], (2.0, 3.0), strict=True):
        c, d = combination["nodes"]
        ends = ("old", "new") if is_second else ("new", "old")
        assert [{"kind": "config", "name": "weight", ends[0]: 1.0, ends[1]: weight}] == c["changes"]
        assert [("c", "both", []), ("d", "both", [])] == [(node["node"], node["in"], node["inputs"]) for node in (c, d)]
        assert [] == d["changes"], "that it reads the copy is no difference"


def test_the_swept_values_are_named_and_no_copy_is_told_as_a_node_of_one_run_alone(
    swept: tuple[Toy, dict[str, str]],
) -> None:
    toy, runs = swept
    text = toy.dflow("diff", runs["plain"], runs["swept"]).stdout
    assert (
        "The second is a sweep of 2 combinations; each copy of a node is compared with that node of the first:" in text
    )
    assert "\n  c.weight: 2.0, 3.0\n" in text
    for weight in ("2.0", "3.0"):
        block = text.partition(f"--- c.weight={weight} ---")[2].partition("---")[0]
        assert f"  config changed: c.weight from 1.0 to {weight}\n" in block
    assert ("only in", "c-weight") == tuple(word for word in ("only in", "c-weight") if word not in text)


def test_of_two_sweeps_a_copy_that_one_has_alone_is_told_with_its_origin(swept: tuple[Toy, dict[str, str]]) -> None:
    toy, runs = swept
    lines = toy.dflow("diff", runs["swept"], runs["other"]).stdout.splitlines()
    rows = {line.split()[0]: line for line in reversed(lines) if line[:2] == "c-"}
    ends = {"2": "only in the first, a copy of c", "3": "the same", "4": "only in the second, a copy of c"}
    assert [True] * 3 == [rows[f"c-weight_{weight}_0"].endswith(end) for weight, end in ends.items()]


def test_of_a_large_sweep_the_first_combinations_are_told(swept: tuple[Toy, dict[str, str]]) -> None:
    toy, runs = swept
    result = toy.dflow("run", str(toy.file), "--sweep", f"d.steps={list(range(1, 19))}")
    assert 0 == result.returncode, result.stderr
    text = toy.dflow("diff", runs["plain"]).stdout
    assert 16 == text.count("--- d.steps=")
    assert "and 2 more combinations: dflow diff --json" in text
    assert 18 == len(json.loads(toy.dflow("diff", runs["plain"], "--json").stdout)["combinations"])
