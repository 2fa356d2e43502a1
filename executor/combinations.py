"""The combinations of a sweep, or of the groups of for_each: what a user compares, each with the nodes that it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from attrs import define, field

from dsl.graph import Graph, GraphNode
from executor.node_facts import params
from executor.record import NodeState


@define(slots=False)
class Combination:
    """One choice of a variant in every group. values: by group, of a sweep the field, what was chosen.

    nodes: the copies that it has, in the order of the graph. own: those of them that no other combination has.
    """

    values: dict[str, str]
    nodes: list[GraphNode] = field(factory=list)
    own: set[str] = field(factory=set)

    @cached_property
    def name(self) -> str:
        """`lr=0.001, block_size=8`: with the node before a field that two nodes have."""
        ends = [group.rpartition(".")[2] for group in self.values]
        shown = [end if ends.count(end) == 1 else group for group, end in zip(self.values, ends, strict=True)]
        return ", ".join(f"{name}={value}" for name, value in zip(shown, self.values.values(), strict=True))

    def result_nodes(self, graph: Graph) -> list[GraphNode]:
        results = set(graph.result_nodes)
        return [node for node in self.nodes if node.id in results]


def combinations(graph: Graph) -> list[Combination]:
    """In the order of the variants; none where nothing was copied.

    Where nodes were copied by some of the groups alone, they belong to every combination with their variants.
    """
    chosen = {node.id: frozenset(node.copy.values.items()) for node in graph.nodes.values() if node.copy is not None}
    distinct = list(dict.fromkeys(chosen.values()))
    largest = max(map(len, distinct), default=0)
    whole = [one for one in distinct if len(one) == largest or not any(one < other for other in distinct)]
    found = {one: Combination({}) for one in whole}
    owners: dict[frozenset[tuple[str, str]], list[Combination]] = {
        one: [found[other] for other in whole if one <= other] for one in distinct
    }
    for node_id, one in chosen.items():
        for combination in owners[one]:
            combination.nodes.append(graph.nodes[node_id])
        if len(owners[one]) == 1:
            owners[one][0].own.add(node_id)
    for combination in found.values():
        combination.values = _values(combination.nodes)
    return list(found.values())


def _values(nodes: Iterable[GraphNode]) -> dict[str, str]:
    """As the nodes have them now: `resume -s` may have given a copy another one."""
    values: dict[str, str] = {}
    for node in nodes:
        if node.copy is not None:
            values |= {group: shown for group, shown in node.copy.values.items() if group not in values}
    for node in nodes:
        given = params(node) if node.copy is not None else {}
        for group in values:
            template, _, name = group.partition(".")
            if node.copy is not None and template == node.copy.template and name in given:
                values[group] = given[name]
    return values


def differing_params(found: Iterable[Combination]) -> list[dict[str, str]]:
    """For each combination the parameters of its copies, as node.field, that are not the same in all combinations."""
    flat = [
        {f"{_name_of(node)}.{name}": value for node in each.nodes for name, value in params(node, edges=False).items()}
        for each in found
    ]
    names = dict.fromkeys(name for each in flat for name in each)
    differing = [name for name in names if len({each.get(name) for each in flat}) > 1]
    return [{name: each[name] for name in differing if name in each} for each in flat]


def final_metrics(nodes: Iterable[GraphNode], states: Mapping[str, NodeState]) -> dict[str, tuple[str, float]]:
    """By the name under which it is shown, the node that has a final metric, and its value.

    Where several of the nodes have a metric of one name, each stands behind its node: `eval_long/eval/tau`.
    """
    done = [node for node in nodes if states[node.id].state == "done"]
    owners: dict[str, list[GraphNode]] = {}
    for node in done:
        for name in states[node.id].metrics:
            owners.setdefault(name, []).append(node)
    return {
        name if len(owning) == 1 else f"{_name_of(node)}/{name}": (node.id, states[node.id].metrics[name])
        for name, owning in owners.items()
        for node in owning
    }


def _name_of(node: GraphNode) -> str:
    """The same for all copies of a node."""
    return node.id if node.copy is None else node.copy.template
