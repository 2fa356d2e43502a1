"""Fields that came after artifacts were made with their op: a config without one keeps its key."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from attrs import evolve

from dsl.graph import GraphNode
from dsl.launch import Launch
from dsl.op import OpSpec, Ref
from dsl.op_table import all_ops
from executor.keys.node_key import key_config, node_inputs

LATE = [
    pytest.param(spec, name, id=f"{spec.name}.{name}")
    for spec in all_ops().values()
    for name, field in spec.fields.items()
    if not field.keyed_default
]
REQUIRED = {"ingest": {"source": "builtin:digits"}, "load_target": {"checkpoint": "folder"}}  # besides edges


def config_of(spec: OpSpec) -> Any:
    """A config with nothing but what its op requires."""
    edges = {name: [Ref("above")] if edge.many else Ref("above") for name, edge in spec.edges.items()}
    return spec.config_class(**edges, **REQUIRED.get(spec.name, {}))


def key_of(config: Any, spec: OpSpec) -> dict[str, object]:
    return key_config(GraphNode(id="node", config=config, op=spec, launch=Launch(), inputs={}))


@pytest.mark.parametrize(("spec", "name"), LATE)
def test_a_config_without_a_late_field_has_the_key_from_before_it_and_another_value_has_a_key_of_its_own(
    spec: OpSpec, name: str
) -> None:
    config = config_of(spec)
    before = evolve(spec, fields={each: field for each, field in spec.fields.items() if each != name})
    key = key_of(config, before)
    assert name not in key and key
    assert key == key_of(config, spec)
    table = spec.fields[name].table
    other = copy.copy(config)
    object.__setattr__(other, name, "other" if table is None else table())  # whatever other fields it would need
    changed = key_of(other, spec)
    assert changed.pop(name) and key == changed


def test_late_fields_are_found_in_the_ops() -> None:
    found = {param.id for param in LATE}
    assert {"ingest.default_tools", "tokenize_chat.contexts", "regenerate_answers.history", "evaluate.prompts"} <= found


def test_an_edge_that_came_later_is_in_the_key_only_where_it_is_given() -> None:
    spec = all_ops()["train_dflash"]
    config = config_of(spec)
    without = node_inputs(GraphNode("node", config, spec, Launch(), {"target": ("above",)}), str)
    assert {"target": "above", "warm_start": None} == {name: without[name] for name in ("target", "warm_start")}
    assert "continues" not in without
    given = node_inputs(GraphNode("node", config, spec, Launch(), {"continues": ("above",)}), str)
    assert "above" == given["continues"]
