"""The combinations of a sweep: each choice of variants is one, whatever its values read like."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from dsl.compile import override_graph
from dsl.convert import typed_value
from dsl.graph import Graph
from dsl.read_toml import read_graph
from dsl.shown import toml_text
from executor.records.run_record import NodeState
from executor.results.sweep import combinations, differing_params, sort_warning, sweep_table

OPS = """
from attrs import frozen
from dsl.op import Artifact, op


class Text(Artifact):
    name = "text"


@op(version=1, run="toy:no")
@frozen(kw_only=True)
class First:
    tags: tuple[str, ...] = ()
    title: str = ""
    is_new: bool = False
    size: int = 1
    output = Text
    judged_by = "eval/tau"
"""
PIPELINE = """
[pipeline]
name = "toy"
ops = ["toy.py"]

[node.a]
op = "first"

[node.b]
op = "first"
"""


def swept(folder: Path, *sweeps: str) -> Graph:
    (folder / "toy.py").write_text(OPS)
    (folder / "toy.toml").write_text(PIPELINE)
    return read_graph(folder / "toy.toml", sweeps=sweeps)


def names(graph: Graph) -> list[str]:
    return [each.name for each in combinations(graph)]


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        ('b.tags=[["a_b"],["a","b"]]', ['tags=["a_b"]', 'tags=["a", "b"]']),
        ('b.title=["1","one, two"]', ['title="1"', 'title="one, two"']),
        ('b.title=["true","a\\nb","plain"]', ['title="true"', 'title="a\\nb"', "title=plain"]),
        ("b.is_new=[true,false]", ["is_new=true", "is_new=false"]),
    ],
)
def test_values_are_shown_as_toml_has_them_and_each_is_a_combination(
    tmp_path: Path, sweep: str, expected: Sequence[str]
) -> None:
    graph = swept(tmp_path, sweep)
    assert expected == names(graph)
    shown = [name.partition("=")[2] for name in expected]
    field = sweep.partition("=")[0]
    assert shown == [each.values[field] for each in combinations(graph)]


def test_independent_fields_of_one_name_are_told_with_their_nodes(tmp_path: Path) -> None:
    graph = swept(tmp_path, "a.size=[1,2]", "b.size=[1,2]")
    assert ["a.size=1", "a.size=2", "b.size=1", "b.size=2"] == names(graph)


def test_copies_that_were_given_one_value_stay_two_combinations_of_two_names(tmp_path: Path) -> None:
    graph = override_graph(swept(tmp_path, "b.size=[1,2,3]"), ["b-size_2.size=1"])
    found = combinations(graph)
    assert ["size=1 (was size=1)", "size=1 (was size=2)", "size=3"] == [each.name for each in found]
    assert [["b-size_1"], ["b-size_2"], ["b-size_3"]] == [[node.id for node in each.nodes] for each in found]
    assert ["1", "1", "3"] == [each["b.size"] for each in differing_params(found)]


def test_a_value_of_several_lines_is_one_row_of_the_table(tmp_path: Path) -> None:
    graph = swept(tmp_path, 'b.title=["a\\nb","c"]')
    states = {node_id: NodeState(state="done") for node_id in graph.nodes}
    assert ["results of 2 combinations", "b.title", '"a\\nb"', "c"] == sweep_table(graph, states).splitlines()


def measured(graph: Graph, *metrics: dict[str, float]) -> list[str]:
    """The table of a sweep of b whose copies have these metrics."""
    states = {node_id: NodeState(state="done") for node_id in graph.nodes}
    for node_id, values in zip([node_id for node_id in graph.nodes if node_id != "a"], metrics, strict=True):
        states[node_id].metrics = values
    return sweep_table(graph, states).splitlines()


@pytest.mark.parametrize("sort_by", ["eval/tua", "-eval/tua"])
def test_a_table_to_be_sorted_by_an_unknown_metric_is_sorted_as_usual_and_names_those_there_are(
    tmp_path: Path, sort_by: str
) -> None:
    graph = evolve(swept(tmp_path, "b.size=[1,2]"), sort_by=sort_by)
    lines = measured(graph, {"eval/tau": 2.0, "eval/tau_low": 1.0}, {"eval/tau": 3.0, "eval/tau_low": 0.5})
    assert "results of 2 combinations, by eval/tau" == lines[0]
    assert [["2", "3"], ["1", "2"]] == [line.split()[:2] for line in lines[2:4]]
    told = 'not sorted by eval/tua: no combination has this metric; did you mean "eval/tau"?; there are: '
    assert f"{told}eval/tau, eval/tau_low" == lines[-1]


def test_a_table_without_any_metric_says_so(tmp_path: Path) -> None:
    graph = evolve(swept(tmp_path, "b.size=[1,2]"), sort_by="eval/tua")
    assert "not sorted by eval/tua: no combination has any metric yet" == measured(graph, {}, {})[-1]


def test_a_table_is_sorted_by_any_metric_that_there_is_though_it_has_no_column_of_its_own(tmp_path: Path) -> None:
    graph = evolve(swept(tmp_path, "b.size=[1,2]"), sort_by="eval/tau_low")
    bounds = {"eval/tau_low": 1.0, "eval/tau_high": 4.0}
    lines = measured(graph, {"eval/tau": 2.0} | bounds, {"eval/tau": 3.0} | bounds | {"eval/tau_low": 0.5})
    assert "results of 2 combinations, by eval/tau_low" == lines[0]
    assert ["1", "2"] == [line.split()[0] for line in lines[2:]]


@pytest.mark.parametrize(
    ("sort_by", "told"),
    [
        ("", None),
        ("eval/tau", None),
        ("-eval/tau", None),
        ("eval/tau_text", None),
        ("train/loss", None),
        ("tau", 'did you mean "eval/tau"?'),
        ("eval/tua", 'did you mean "eval/tau"?'),
        ("-loss", 'metrics are named with their group, as in "train/loss"'),
    ],
)
def test_a_metric_that_looks_misspelt_is_told_before_anything_runs(
    tmp_path: Path, sort_by: str, told: str | None
) -> None:
    name = sort_by.removeprefix("-")
    graph = evolve(swept(tmp_path, "b.size=[1,2]"), sort_by=sort_by)
    assert ("" if told is None else f"the table of the sweep is to be sorted by {name}: {told}") == sort_warning(graph)


TWICE = """
[pipeline]
name = "toy"
ops = ["toy.py"]

[node.long]
op = "first"

[node.eval]
op = "first"
size = "${long.size}"
"""


def judged_twice(folder: Path, done: dict[str, dict[str, float]], sort_by: str = "") -> list[str]:
    """The table of a sweep in which two nodes of each combination are judged by eval/tau. done: metrics by node."""
    (folder / "toy.py").write_text(OPS)
    (folder / "toy.toml").write_text(TWICE)
    graph = evolve(read_graph(folder / "toy.toml", sweeps=["long.size=[1,2]"]), sort_by=sort_by)
    assert done.keys() <= graph.nodes.keys()
    states = {
        node_id: NodeState(state="done" if node_id in done else "failed", metrics=done.get(node_id, {}))
        for node_id in graph.nodes
    }
    return sweep_table(graph, states).splitlines()


@pytest.mark.parametrize(
    ("sort_by", "by", "sizes"),
    [
        ("", "long/eval/tau", ["2", "1"]),
        ("eval/tau", "long/eval/tau", ["2", "1"]),
        ("-eval/tau", "long/eval/tau", ["1", "2"]),
        ("eval/eval/tau", "eval/eval/tau", ["1", "2"]),
        ("eval/loss", "long/eval/loss", ["1", "2"]),
    ],
)
def test_where_two_nodes_have_the_metric_the_first_one_sorts_and_is_named(
    tmp_path: Path, sort_by: str, by: str, sizes: list[str]
) -> None:
    done = {
        "long-size_1": {"eval/tau": 2.0, "eval/loss": 3.0},
        "long-size_2": {"eval/tau": 3.0, "eval/loss": 2.0},
        "eval-size_1": {"eval/tau": 5.0, "eval/loss": 1.0},
        "eval-size_2": {"eval/tau": 4.0, "eval/loss": 1.0},
    }
    lines = judged_twice(tmp_path, done, sort_by)
    assert f"results of 2 combinations, by {by}" == lines[0]
    assert by == lines[1].split()[1]
    assert sizes == [line.split()[0] for line in lines[2:4]]
    assert 4 == len(lines), lines


def test_a_metric_stands_behind_its_node_also_where_the_other_node_that_has_it_failed(tmp_path: Path) -> None:
    done = {
        "long-size_1": {"eval/tau": 2.0},
        "long-size_2": {"eval/tau": 3.0},
        "eval-size_1": {"eval/tau": 5.0},
    }
    lines = judged_twice(tmp_path, done)
    assert "results of 2 combinations, by long/eval/tau" == lines[0]
    assert ["long.size", "state", "long/eval/tau", "eval/eval/tau"] == lines[1].split()
    assert [["2", "3", "-"], ["1", "2", "5"]] == [[cells[0], *cells[-2:]] for cells in map(str.split, lines[2:])]


def test_a_metric_behind_a_node_is_not_misspelt(tmp_path: Path) -> None:
    assert "" == sort_warning(evolve(swept(tmp_path, "b.size=[1,2]"), sort_by="b/eval/tau"))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=2),
    max_leaves=6,
)


@given(VALUES, VALUES)
def test_values_that_are_not_the_same_read_differently(one: object, other: object) -> None:
    assert (repr(one) == repr(other)) == (toml_text(one) == toml_text(other))


@given(st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.lists(st.booleans()))
def test_a_shown_value_given_on_the_command_line_is_that_value(value: object) -> None:
    assert repr(value) == repr(typed_value(toml_text(value), None))


@given(st.from_regex(r"[\w./~@:+-]+", fullmatch=True))
def test_a_shown_word_given_on_the_command_line_is_that_word(word: str) -> None:
    assert word == typed_value(toml_text(word), None)
