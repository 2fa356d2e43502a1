"""The combinations of a sweep: each choice of variants is one, whatever its values read like."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.graph import Graph
from dsl.overrides import override_graph
from dsl.read_toml import read_graph
from dsl.shown import toml_text
from dsl.typed_text import typed_value
from executor.combinations import combinations, differing_params
from executor.record import NodeState
from executor.sweep_table import sweep_table

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
