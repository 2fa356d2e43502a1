"""Nodes that are copied, once for every variant, so that one pipeline compares several.

    [for_each.draft.small]              # a group "draft" with the variants small and large
    train.num_layers = 2
    [for_each.draft.large]
    train.num_layers = 5

    [sweep]                             # a group for every field, a variant for every value
    train.lr = [1e-3, 3e-4]

Every node that a variant of a group changes, and every node that reads from one, directly or not, is copied once per
variant, as `train-small`; references to copied nodes become those to the copies of the same variant. All other nodes
are shared. Groups multiply: a node of two groups is copied for every pair of variants.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from attrs import define

from dsl.document import Document, Places, merged
from dsl.errors import known_nodes, shortened
from dsl.finding import Field, Finding, Position
from dsl.interpolation import FIELD, OPENING, TOKEN, Cell, referred_fields
from dsl.op import Ref
from dsl.order import children_of, reached
from dsl.pipeline import Copy
from dsl.toml import KeyPath
from dsl.unchecked_node import WrittenNode
from dsl.variants import Group, Sweep, Variant, groups_of, mistake_at

MAX_COPIES = 10_000

ReadNode = Callable[[str, Mapping[str, Any], Places], WrittenNode]


def expanded(
    nodes: Mapping[str, WrittenNode],
    sweeps: Sequence[Sweep] = (),
    document: Document | None = None,
    read_node: ReadNode | None = None,
) -> tuple[dict[str, WrittenNode], list[Finding]]:
    """The nodes with the copies in the templates' places. read_node makes a node that a variant gives another op."""
    groups, mistakes = groups_of(document, sweeps)
    if not groups:
        return dict(nodes), mistakes
    expansion = _Expansion(nodes, groups, document, read_node)
    mistakes += expansion.unknown_nodes()
    if expansion.count() > MAX_COPIES:
        names = " x ".join(f"{group.name} ({len(group.variants)})" for group in groups)
        message = f"for_each and sweep make {expansion.count():,} nodes, more than {MAX_COPIES:,}: {names}"
        return dict(nodes), [*mistakes, mistake_at(document, groups[-1].variants[0].place, message)]
    return expansion.run(), [*mistakes, *expansion.mistakes]


def merged_mistakes(mistakes: Sequence[Finding], nodes: Mapping[str, WrittenNode]) -> list[Finding]:
    """The mistakes with the ids of copies as those of the nodes that they are copies of, each once: mistakes in the
    copies of a node are those of the node, under the names that the file gives.
    """
    templates = {node.id: node.template for node in nodes.values() if node.template}
    if not templates:
        return list(mistakes)
    longest_first = sorted(templates, key=len, reverse=True)
    copied = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w-])")

    def as_written(text: str) -> str:
        return copied.sub(lambda found: templates[found[0]], text)

    renamed = [
        attrs.evolve(mistake, what=as_written(mistake.what), advice=_hint(mistake, as_written))
        if mistake.path.startswith("node.") or mistake.position is None or mistake.position.is_argument
        else mistake
        for mistake in mistakes
    ]
    return list(dict.fromkeys(renamed))


def _hint(mistake: Finding, as_written: Callable[[str], str]) -> str:
    """The hint for an argument keeps the names of copies, because an argument may change a single copy."""
    is_argument = mistake.position is not None and mistake.position.is_argument
    return mistake.advice if is_argument else as_written(mistake.advice)


@define
class _Expansion:
    nodes: Mapping[str, WrittenNode]
    groups: Sequence[Group]
    document: Document | None
    read_node: ReadNode | None
    mistakes: list[Finding] = attrs.Factory(list)
    member_of: dict[str, tuple[Group, ...]] = attrs.field(init=False)  # the groups of every node, in their order

    def __attrs_post_init__(self) -> None:
        self.member_of = self._memberships()

    def unknown_nodes(self) -> Iterator[Finding]:
        for group in self.groups:
            for variant in group.variants:
                for node_id in variant.changes:
                    if node_id not in self.nodes:
                        place = variant.place if isinstance(variant.place, Position) else (*variant.place, node_id)
                        if group.name.startswith("sweep."):
                            place = variant.place
                        message = f'there is no node "{shortened(node_id)}"'
                        yield mistake_at(self.document, place, message, known_nodes(node_id, self.nodes))
                if group.name.startswith("sweep."):
                    break

    def count(self) -> int:
        return sum(math.prod(len(group.variants) for group in groups) for groups in self.member_of.values())

    def run(self) -> dict[str, WrittenNode]:
        copies: dict[str, WrittenNode] = {}
        for node_id, node in self.nodes.items():
            groups = self.member_of[node_id]
            for chosen in itertools.product(*(group.variants for group in groups)):
                names = {group.name: variant.name for group, variant in zip(groups, chosen, strict=True)}
                copy = self._copy(node, chosen, names) if groups else self._shared(node)
                if groups and (copy.id in copies or copy.id in self.nodes):
                    message = f'the copy "{copy.id}" of node "{node_id}" would have the id of another node'
                    self.mistakes.append(mistake_at(self.document, chosen[-1].place, message, "rename one of them"))
                else:
                    copies[copy.id] = copy
        return copies

    def _memberships(self) -> dict[str, tuple[Group, ...]]:
        """A node is in the groups that change one of its values, and in those of all nodes that it reads."""
        children = children_of({node_id: [*self._read_by(node)] for node_id, node in self.nodes.items()})
        users = self._users()
        member_of: dict[str, list[Group]] = {node_id: [] for node_id in self.nodes}
        for group in self.groups:
            cells = reached({cell for cell in self._changed(group, users) if cell[0] in self.nodes}, users)
            for node_id in reached({owner for owner, _field in cells}, children):
                member_of[node_id].append(group)
        return {node_id: tuple(groups) for node_id, groups in member_of.items()}

    def _read_by(self, node: WrittenNode) -> Iterator[str]:
        for table in self._tables_of(node):
            for name, value in table.items():
                if node.op is None or name in node.edges or "op" in table:
                    yield from (found for found in _references(value) if found in self.nodes)

    def _users(self) -> dict[Cell, list[Cell]]:
        """Field -> the fields whose texts refer to it."""
        users: dict[Cell, list[Cell]] = {}
        for node in self.nodes.values():
            tables = [*self._tables_of(node), {"launch": node.launch}]
            for name, value in [cell for table in tables for cell in _cells(table)]:
                for cell in referred_fields(value):
                    users.setdefault(cell, []).append((node.id, name))
        return users

    def _tables_of(self, node: WrittenNode) -> list[Mapping[str, Any]]:
        """What the node may be given, by its own table and by variants."""
        variants = (variant.changes.get(node.id, {}) for group in self.groups for variant in group.variants)
        return [node.values, *variants]

    def _changed(self, group: Group, users: Mapping[Cell, Sequence[Cell]]) -> Iterator[Cell]:
        for variant in group.variants:
            for node_id, change in variant.changes.items():
                yield from ((node_id, name) for name in _places_of_change(change, variant, node_id))
                if "op" in change:  # all values of the node may be others
                    yield from (cell for cell in users if cell[0] == node_id)

    def _shared(self, node: WrittenNode) -> WrittenNode:
        """The node itself; what it takes from a node that is copied comes from a copy."""
        node.values = {name: self._rewired(value, {}, False) for name, value in node.values.items()}
        node.launch = {name: self._rewired(value, {}, False) for name, value in node.launch.items()}
        return node

    def _copy(self, node: WrittenNode, chosen: Sequence[Variant], names: Mapping[str, str]) -> WrittenNode:
        values, launch, places = node.values, node.launch, node.places
        copy_id = "-".join([node.id, *names.values()])
        op = node.op
        for variant in chosen:
            change = variant.changes.get(node.id)
            if change is None:
                continue
            moved = _places_of_change(change, variant, node.id)
            if "op" in change and self.read_node is not None and (op is None or change["op"] != op.name):
                fresh = self.read_node(node.id, change, Places(self.document, ("node", node.id), moved))
                op, values, launch, places = fresh.op, fresh.values, fresh.launch, fresh.places
                continue
            self._report_overridden(node, moved, variant, copy_id)
            rest = {name: value for name, value in change.items() if name not in ("op", "launch")}
            values = merged(values, rest)
            launch = merged(launch, change.get("launch", {}))
            places = places.moved(moved)
        shown = {group.shown: variant.shown for group, variant in zip(self.member_of[node.id], chosen, strict=True)}
        copy = WrittenNode(copy_id, op, {}, {}, places, copy=Copy(node.id, shown))
        is_edge = {name: op is None or name in copy.edges for name in values}
        copy.values = {name: self._rewired(value, names, is_edge[name]) for name, value in values.items()}
        copy.launch = {name: self._rewired(value, names, False) for name, value in launch.items()}
        return copy

    def _report_overridden(self, node: WrittenNode, moved: Mapping[str, Any], variant: Variant, copy_id: str) -> None:
        for name in moved:
            for given in {name, name.partition(".")[0]}:
                position = node.places.elsewhere.get(given)
                if isinstance(position, Position) and position.is_argument:
                    where = (
                        variant.place.file if isinstance(variant.place, Position) else ".".join(map(str, variant.place))
                    )
                    message = f"{shortened(where)} sets this very value"
                    mistake = Finding(
                        message,
                        Field(position=position),
                        f"name one copy: -s {shortened(copy_id)}.{shortened(name)}=...",
                    )
                    if all(mistake.position != other.position for other in self.mistakes):
                        self.mistakes.append(mistake)

    def _rewired(self, value: Any, names: Mapping[str, str], is_edge: bool) -> Any:
        if isinstance(value, Ref) and is_edge:
            return Ref(self._copy_id(value.node, names))
        if isinstance(value, str):
            if is_edge and value.startswith("@"):
                return "@" + self._copy_id(value[1:], names)
            return TOKEN.sub(lambda token: self._rewired_token(token, names), value) if OPENING in value else value
        if isinstance(value, (list, tuple)):
            return type(value)(self._rewired(member, names, is_edge) for member in value)
        if isinstance(value, dict):
            return {key: self._rewired(member, names, is_edge) for key, member in value.items()}
        return value

    def _rewired_token(self, token: re.Match[str], names: Mapping[str, str]) -> str:
        found = FIELD.fullmatch(token["body"] or "")
        return token[0] if found is None else f"${{{self._copy_id(found[1], names)}.{found[2]}{token['end']}"

    def _copy_id(self, node_id: str, names: Mapping[str, str]) -> str:
        """The copy of a node that belongs to these variants; the node itself where it is shared.

        A node that only takes a value which is the same in all copies is in none of their groups: any copy will do.
        """
        groups = self.member_of.get(node_id, ())
        return "-".join([node_id, *(names.get(group.name, group.variants[0].name) for group in groups)])


def _cells(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values, and those in tables as "table.key" too."""
    for name, value in table.items():
        yield name, value
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", each) for key, each in value.items())


def _references(value: Any) -> Iterator[str]:
    members = value if isinstance(value, (list, tuple)) else [value]
    for member in members:
        if isinstance(member, Ref):
            yield member.node
        elif isinstance(member, str) and member.startswith("@"):
            yield member[1:]


def _places_of_change(change: Mapping[str, Any], variant: Variant, node_id: str) -> dict[str, KeyPath | Position]:
    """Where the values of a change stand, by field and "table.field"."""
    fields = [name for name, value in _cells(change) if name != "launch" or not isinstance(value, dict)]
    if isinstance(variant.place, Position) or variant.place[0] == "sweep":
        return dict.fromkeys(fields, variant.place)
    return {name: (*variant.place, node_id, *name.split(".")) for name in fields}
