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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from attrs import define, frozen

from dsl.document import Document, Places, merged
from dsl.errors import Mistake, Position, did_you_mean
from dsl.op import Ref
from dsl.order import children_of
from dsl.positions import KeyPath
from dsl.typed_text import typed_value
from dsl.values import FIELD, OPENING, TOKEN, referred_fields
from dsl.written import WrittenNode

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
MAX_COPIES = 10_000
VALUE_LENGTH = 32

ReadNode = Callable[[str, Mapping[str, Any], Places], WrittenNode]


@frozen
class Variant:
    """What one variant changes: node id -> the node's table as far as it is another one. place is where it stands."""

    name: str
    changes: Mapping[str, Mapping[str, Any]]
    place: KeyPath | Position


@frozen
class Group:
    """Variants of which every copy has one."""

    name: str
    variants: tuple[Variant, ...]


@frozen
class Sweep:
    """`--sweep node.field=[...]` as it was given."""

    text: str

    @property
    def position(self) -> Position:
        return Position(f"--sweep {self.text}", is_argument=True)


def groups_of(document: Document | None, sweeps: Sequence[Sweep]) -> tuple[list[Group], list[Mistake]]:
    """The groups of `[for_each]`, then those of `[sweep]`, whose values a sweep on the command line replaces."""
    mistakes: list[Mistake] = []
    groups: list[Group] = []
    swept: dict[str, tuple[Any, KeyPath | Position]] = {}
    if document is not None:
        groups += _written_groups(document, mistakes)
        table = document.values.get("sweep", {})
        swept |= {".".join(path): (values, ("sweep", *path)) for path, values in _leaves(table)}
    for sweep in sweeps:
        path, equals, text = (part.strip() for part in sweep.text.partition("="))
        try:
            values = typed_value(text, None)
        except ValueError as error:
            mistakes.append(Mistake(str(error), position=sweep.position))
            continue
        if not equals or path.count(".") < 1 or not all(path.split(".")):
            mistakes.append(Mistake("expected node.field=[value, value]", position=sweep.position))
            continue
        swept[path] = (values, sweep.position)
    for path, (values, place) in swept.items():
        groups += _swept_group(path, values, place, document, mistakes)
    return groups, mistakes


def expanded(
    nodes: Mapping[str, WrittenNode],
    sweeps: Sequence[Sweep] = (),
    document: Document | None = None,
    read_node: ReadNode | None = None,
) -> tuple[dict[str, WrittenNode], list[Mistake]]:
    """The nodes with the copies in the templates' places. read_node makes a node that a variant gives another op."""
    groups, mistakes = groups_of(document, sweeps)
    if not groups:
        return dict(nodes), mistakes
    expansion = _Expansion(nodes, groups, document, read_node)
    mistakes += expansion.unknown_nodes()
    if expansion.count() > MAX_COPIES:
        names = " x ".join(f"{group.name} ({len(group.variants)})" for group in groups)
        message = f"for_each and sweep make {expansion.count():,} nodes, more than {MAX_COPIES:,}: {names}"
        return dict(nodes), [*mistakes, _mistake(document, groups[-1].variants[0].place, message)]
    return expansion.run(), [*mistakes, *expansion.mistakes]


def _written_groups(document: Document, mistakes: list[Mistake]) -> Iterator[Group]:
    for name, variants in document.values.get("for_each", {}).items():
        place = ("for_each", name)
        if not isinstance(variants, dict) or not variants:
            hint = f"[for_each.{name}.<variant>] with node.field = value"
            mistakes.append(_mistake(document, place, "a group has one table for each variant", hint))
            continue
        found = []
        for variant, changes in variants.items():
            here = (*place, variant)
            wrong = _wrong_variant(variant, changes)
            if wrong:
                mistakes.append(_mistake(document, here, wrong, "train.num_layers = 2"))
                continue
            found.append(Variant(variant, changes, here))
        if found and not any(variant.changes for variant in found):
            mistakes.append(_mistake(document, place, "no variant of this group changes a value"))
        elif found:
            yield Group(f"for_each.{name}", tuple(found))


def _wrong_variant(name: str, changes: Any) -> str:
    if not NAME.fullmatch(name):
        return f'variant "{name}": letters, digits, "_" and "-" only, since it is a part of node ids'
    if not isinstance(changes, dict) or not all(isinstance(change, dict) for change in changes.values()):
        return "expected a table of node.field = value"
    if not all(isinstance(change.get("launch", {}), dict) for change in changes.values()):
        return "launch: expected a table"
    return ""


def _swept_group(
    path: str, values: Any, place: KeyPath | Position, document: Document | None, mistakes: list[Mistake]
) -> Iterator[Group]:
    node_id, _, field = path.partition(".")
    if not field:
        mistakes.append(_mistake(document, place, "expected node.field = [value, value]"))
    elif not isinstance(values, (list, tuple)) or not values:
        mistakes.append(_mistake(document, place, "expected a list of values, one for each copy", "[1e-3, 3e-4]"))
    elif len({(type(value), repr(value)) for value in values}) < len(values):
        mistakes.append(_mistake(document, place, "a value is given twice"))
    else:
        names = _value_names(field, values)
        tables = [_nested(field.split("."), value) for value in values]
        variants = [Variant(name, {node_id: table}, place) for name, table in zip(names, tables, strict=True)]
        yield Group(f"sweep.{path}", tuple(variants))


def _value_names(field: str, values: Iterable[Any]) -> list[str]:
    """`lr_0_001`: the field and the value, in the characters of ids, each name once."""
    names: list[str] = []
    for value in values:
        shown = re.sub(r"[^A-Za-z0-9-]+", "_", _shown(value)).strip("_")[:VALUE_LENGTH]
        name = f"{field.rpartition('.')[2]}_{shown}"
        same = sum(name == other or other.startswith(f"{name}_again") for other in names)
        names.append(f"{name}_again{same}" if same else name)
    return names


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "_".join(_shown(member) for member in value)
    if isinstance(value, dict):
        return "_".join(f"{key}_{_shown(member)}" for key, member in value.items())
    return str(value)


def _nested(keys: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def _leaves(table: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*map(str, path), key), value


def _mistake(document: Document | None, place: KeyPath | Position, message: str, hint: str = "") -> Mistake:
    if isinstance(place, Position):
        return Mistake(message, position=place, hint=hint)
    position = document.position(place) if document is not None else None
    return Mistake(message, ".".join(map(str, place)), position, hint)


@define
class _Expansion:
    nodes: Mapping[str, WrittenNode]
    groups: Sequence[Group]
    document: Document | None
    read_node: ReadNode | None
    mistakes: list[Mistake] = attrs.Factory(list)
    member_of: dict[str, tuple[Group, ...]] = attrs.field(init=False)  # the groups of every node, in their order

    def __attrs_post_init__(self) -> None:
        self.member_of = self._memberships()

    def unknown_nodes(self) -> Iterator[Mistake]:
        for group in self.groups:
            for variant in group.variants:
                for node_id in variant.changes:
                    if node_id not in self.nodes:
                        place = variant.place if isinstance(variant.place, Position) else (*variant.place, node_id)
                        if group.name.startswith("sweep."):
                            place = variant.place
                        message = f'there is no node "{node_id}"'
                        yield _mistake(self.document, place, message, did_you_mean(node_id, list(self.nodes)))
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
                copy = self._copy(node, chosen, names) if groups else node
                if groups and (copy.id in copies or copy.id in self.nodes):
                    message = f'the copy "{copy.id}" of node "{node_id}" would have the id of another node'
                    self.mistakes.append(_mistake(self.document, chosen[-1].place, message, "rename one of them"))
                copies[copy.id] = copy
        return copies

    def _memberships(self) -> dict[str, tuple[Group, ...]]:
        """A node is in the groups that change it, and in those of all nodes it reads or takes a value from."""
        parents = {node_id: [*self._read_by(node)] for node_id, node in self.nodes.items()}
        children = children_of(parents)
        member_of: dict[str, list[Group]] = {node_id: [] for node_id in self.nodes}
        for group in self.groups:
            changed = {node_id for variant in group.variants for node_id in variant.changes if node_id in self.nodes}
            reached = set(changed)
            waiting = list(changed)
            while waiting:
                fresh = [child for child in children[waiting.pop()] if child not in reached]
                reached.update(fresh)
                waiting += fresh
            for node_id in reached:
                member_of[node_id].append(group)
        return {node_id: tuple(groups) for node_id, groups in member_of.items()}

    def _read_by(self, node: WrittenNode) -> Iterator[str]:
        variants = [variant.changes.get(node.id, {}) for group in self.groups for variant in group.variants]
        for table in (node.values, node.launch, *variants):
            for name, value in table.items():
                if node.op is None or name in node.edges or "op" in table:
                    yield from (found for found in _references(value) if found in self.nodes)
                yield from (owner for owner, _field in referred_fields(value) if owner in self.nodes)

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
        copy = WrittenNode(copy_id, op, {}, {}, places, template=node.id)
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
                    message = f"{where} sets this very value"
                    told = Mistake(message, position=position, hint=f"name one copy: -s {copy_id}.{name}=...")
                    if all(told.position != other.position for other in self.mistakes):
                        self.mistakes.append(told)

    def _rewired(self, value: Any, names: Mapping[str, str], is_edge: bool) -> Any:
        if isinstance(value, Ref):
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
        """The copy of a node that belongs to these variants; the node itself where it is shared."""
        return "-".join([node_id, *(names[group.name] for group in self.member_of.get(node_id, ()))])


def _references(value: Any) -> Iterator[str]:
    members = value if isinstance(value, (list, tuple)) else [value]
    for member in members:
        if isinstance(member, Ref):
            yield member.node
        elif isinstance(member, str) and member.startswith("@"):
            yield member[1:]


def _places_of_change(change: Mapping[str, Any], variant: Variant, node_id: str) -> dict[str, KeyPath | Position]:
    """Where the values of a change stand, by field."""
    fields = [name for name in change if name != "launch"]
    launch = change.get("launch", {})
    fields += [f"launch.{name}" for name in launch] if isinstance(launch, dict) else ["launch"]
    if isinstance(variant.place, Position) or variant.place[0] == "sweep":
        return dict.fromkeys(fields, variant.place)
    return {name: (*variant.place, node_id, *name.split(".")) for name in fields}
