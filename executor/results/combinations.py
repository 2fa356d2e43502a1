"""The combinations of a sweep, or of the groups of for_each: what a user compares, each with the nodes that it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from attrs import define, field

from dsl.graph import Graph, GraphNode
from dsl.shown import toml_text
from executor.records.run_record import NodeState
from executor.results.node_facts import params, values

Choice = frozenset[tuple[str, str]]  # by group, the variant


@define
class Combination:
    """One choice of a variant in every group. values: by group, of a sweep the field, what was chosen.

    name: `lr=0.001, block_size=8`, with the node before a field that two nodes have; no two have the same.
    nodes: the copies that it has, in the order of the graph. own: those of them that no other combination has.
    """

    name: str = ""
    values: dict[str, str] = field(factory=dict)
    nodes: list[GraphNode] = field(factory=list)
    own: set[str] = field(factory=set)

    def result_nodes(self, graph: Graph) -> list[GraphNode]:
        results = set(graph.result_nodes)
        return [node for node in self.nodes if node.id in results]


def combinations(graph: Graph) -> list[Combination]:
    """In the order of the variants; none where nothing was copied.

    Where nodes were copied by some of the groups alone, they belong to every combination with their variants.
    """
    chosen = {node.id: frozenset(node.copy.values.items()) for node in graph.nodes.values() if node.copy is not None}
    owners = whole_choices(chosen.values())
    found = {one: Combination() for one, wholes in owners.items() if one in wholes}
    for node_id, one in chosen.items():
        for whole in owners[one]:
            found[whole].nodes.append(graph.nodes[node_id])
        if len(owners[one]) == 1:
            found[owners[one][0]].own.add(node_id)
    _name(list(found.values()))
    return list(found.values())


def whole_choices(chosen: Iterable[Choice]) -> dict[Choice, list[Choice]]:
    """For each choice of variants those of whole combinations that it is a part of: of one that is whole, itself."""
    distinct = list(dict.fromkeys(chosen))
    largest = max(map(len, distinct), default=0)
    whole = [one for one in distinct if len(one) == largest or not any(one < other for other in distinct)]
    return {one: [other for other in whole if one <= other] for one in distinct}


def _name(found: Iterable[Combination]) -> None:
    """By what the nodes have now: `resume -s` may have given a copy another value, even that of another copy."""
    chosen = [_chosen(combination.nodes) for combination in found]
    groups = dict.fromkeys(group for each in chosen for group in each)
    ends = Counter(_end(group) for group in groups)
    labels = {group: _end(group) if ends[_end(group)] == 1 else group for group in groups}
    for combination, each in zip(found, chosen, strict=True):
        combination.values = each | _given(combination.nodes, each)
        combination.name = _joined(labels, combination.values)
    taken = Counter(combination.name for combination in found)
    for combination, each in zip(found, chosen, strict=True):
        if taken[combination.name] > 1:
            combination.name += f" (was {_joined(labels, each)})"


def _chosen(nodes: Iterable[GraphNode]) -> dict[str, str]:
    """By group, the variant; all combinations differ in them."""
    chosen: dict[str, str] = {}
    for node in nodes:
        chosen |= node.copy.values if node.copy is not None else {}
    return chosen


def _given(nodes: Iterable[GraphNode], groups: Iterable[str]) -> dict[str, str]:
    """Of the fields that are swept, what the nodes have."""
    found = {}
    for node in nodes:
        own = values(node) if node.copy is not None else {}
        for group in groups:
            template, _, name = group.partition(".")
            if node.copy is not None and template == node.copy.template and name in own:
                found[group] = toml_text(own[name])
    return found


def _end(group: str) -> str:
    return group.rpartition(".")[2]


def _joined(labels: Mapping[str, str], chosen: Mapping[str, str]) -> str:
    return ", ".join(f"{labels[group]}={value}" for group, value in chosen.items())


def differing_params(found: Iterable[Combination]) -> list[dict[str, str]]:
    """For each combination the parameters of its copies, as node.field, that are not the same in all combinations."""
    flat = [
        {f"{shown_id(node)}.{name}": value for node in each.nodes for name, value in params(node, edges=False).items()}
        for each in found
    ]
    names = dict.fromkeys(name for each in flat for name in each)
    differing = [name for name in names if len({each.get(name) for each in flat}) > 1]
    return [{name: each[name] for name in differing if name in each} for each in flat]


def final_metrics(nodes: Iterable[GraphNode], states: Mapping[str, NodeState]) -> dict[str, tuple[str, float]]:
    """By the name under which it is shown, the node that has a final metric, and its value.

    Where several of the nodes have a metric of one name, or have one op, each stands behind its node:
    `eval_long/eval/tau`. So it has that name also where the other node is not done.
    """
    listed = list(nodes)
    ops = Counter(node.op.name for node in listed)
    owners: dict[str, list[GraphNode]] = {}
    for node in listed:
        for name in states[node.id].metrics if states[node.id].state == "done" else ():
            owners.setdefault(name, []).append(node)
    found = {}
    for name, owning in owners.items():
        for node in owning:
            is_alone = len(owning) == 1 and ops[node.op.name] == 1
            found[name if is_alone else f"{shown_id(node)}/{name}"] = (node.id, states[node.id].metrics[name])
    return found


def shown_id(node: GraphNode) -> str:
    """The same for all copies of a node."""
    return node.id if node.copy is None else node.copy.template
