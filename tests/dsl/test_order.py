"""The order of a graph and its cycles, against a slow reference: who reads whom, by trying every step."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dsl.order import above, below, children_of, cycles, in_order


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, list[str]]:
    """Parents of up to 7 nodes; cycles, loops and edges that are there twice are welcome."""
    ids = [f"n{k}" for k in range(draw(st.integers(1, 7)))]
    return {node_id: draw(st.lists(st.sampled_from(ids), max_size=3)) for node_id in ids}


def readers(parents: dict[str, list[str]], node_id: str) -> set[str]:
    """The ids of all nodes that read from a node, directly or through others."""
    found: set[str] = set()
    for _ in parents:
        found |= {child for child, ids in parents.items() if {node_id, *found} & set(ids)}
    return found


@given(graphs())
def test_all_that_is_above_and_below(parents: dict[str, list[str]]) -> None:
    for node_id in parents:
        assert below(parents, node_id) == {node_id} | readers(parents, node_id)
        assert above(parents, node_id) == {node_id} | {other for other in parents if node_id in readers(parents, other)}


@given(graphs())
def test_the_order_has_all_that_is_neither_on_a_cycle_nor_below_one(parents: dict[str, list[str]]) -> None:
    on_cycles = {node_id for node_id in parents if node_id in readers(parents, node_id)}
    tangled = on_cycles | {child for node_id in on_cycles for child in readers(parents, node_id)}
    order = in_order(parents)
    assert sorted(order) == sorted(parents.keys() - tangled)
    assert all(order.index(parent) < order.index(node_id) for node_id in order for parent in parents[node_id])


@given(graphs())
def test_every_component_has_one_cycle_and_no_shorter_one(parents: dict[str, list[str]]) -> None:
    components: list[set[str]] = []
    for node_id in parents:
        component = {other for other in readers(parents, node_id) if node_id in readers(parents, other)}
        if component and not any(node_id in earlier for earlier in components):
            components.append(component | {node_id})
    found = cycles(parents)
    children = children_of(parents)
    assert len(components) == len(found)
    for cycle, component in zip(found, components, strict=True):
        assert component >= set(cycle)
        assert all(there in children[here] for here, there in pairwise([*cycle, cycle[0]]))
        assert len(cycle) == min(_shortest(children, start) for start in component)


def _shortest(children: dict[str, list[str]], start: str) -> int:
    """Steps from a node back to itself."""
    here, steps = {start}, 0
    while True:
        here, steps = {child for node_id in here for child in children[node_id]}, steps + 1
        if start in here:
            return steps
