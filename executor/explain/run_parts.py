"""The parts of a run that are compared: the whole run, or what a sweep copied, under the names of what was copied."""

from __future__ import annotations

from collections.abc import Container, Mapping

import attrs
from attrs import field, frozen

from executor.records.graph_file import written_nodes
from executor.records.run_record import Record
from executor.results.combinations import Choice, whole_choices


@frozen
class Part:
    """Some nodes of a run. nodes: by the names under which they are compared, the ids that they have in the run.

    values: of a combination, by group what was chosen.
    """

    record: Record
    nodes: Mapping[str, str]
    values: Mapping[str, str] = field(factory=dict)

    def only(self, names: Container[str]) -> Part:
        return attrs.evolve(self, nodes={name: own for name, own in self.nodes.items() if name in names})

    def without(self, names: Container[str]) -> Part:
        return attrs.evolve(self, nodes={name: own for name, own in self.nodes.items() if name not in names})


def whole(record: Record) -> Part:
    """All nodes under their own ids."""
    return Part(record, {node_id: node_id for node_id in record.state.nodes})


def templates_of(record: Record) -> dict[str, str]:
    """By its id, what each copy of a sweep or of for_each is a copy of. The ops are not asked."""
    written = written_nodes(record.folder)
    return {
        node_id: written[node_id]["copy"]["template"]
        for node_id in record.state.nodes
        if "copy" in written.get(node_id, {})
    }


def combination_parts(record: Record) -> list[Part]:
    """The copies of each combination, in the order of the variants; none where nothing was copied."""
    written = written_nodes(record.folder)
    templates = templates_of(record)
    chosen = {node_id: frozenset(written[node_id]["copy"]["values"].items()) for node_id in templates}
    owners = whole_choices(chosen.values())
    nodes: dict[Choice, dict[str, str]] = {one: {} for one, wholes in owners.items() if one in wholes}
    values: dict[Choice, dict[str, str]] = {one: {} for one in nodes}
    for node_id, one in chosen.items():
        for combination in owners[one]:
            nodes[combination][templates[node_id]] = node_id
            values[combination] |= written[node_id]["copy"]["values"]
    return [Part(record, nodes[one], values[one]) for one in nodes]
