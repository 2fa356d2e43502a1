"""Nodes that are copied, once for every variant, so that one pipeline compares several.

    [for_each.draft.small]              # a group "draft" with the variants small and large
    train.num_layers = 2
    [for_each.draft.large]
    train.num_layers = 5

    [sweep]                             # a group for every field, a variant for every value; --sweep train.lr=[...]
    train.lr = [1e-3, 3e-4]

Every node that a variant of a group changes, and every node that reads from one, directly or not, is copied once per
variant, as `train-small`; references to copied nodes become those to the copies of the same variant. All other nodes
are shared. Groups multiply: a node of two groups is copied for every pair of variants.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from dsl.convert import typed_value
from dsl.errors import known_nodes, shortened
from dsl.finding import Field, Finding, Position
from dsl.interpolation import FIELD, OPENING, TOKEN, referred_fields
from dsl.op import Ref
from dsl.order import children_of, reached
from dsl.pipeline import Copy
from dsl.shown import toml_text
from dsl.toml import KeyPath
from dsl.tree import Tree, merged

MAX_COPIES = 10_000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
VALUE_LENGTH = 32
NEGATIVE = re.compile(r"-(?:[0-9]|inf)")
SORT = "sort"  # the key of [sweep] that sweeps nothing: the metric by which its table is sorted
SWEEP, FOR_EACH = "sweep", "for_each"


@frozen
class Variant:
    """A variant of a group: the values that it changes in nodes, as node id -> a partial table of the node.

    place: where the variant is written. shown: the text that users see, such as a sweep's value; unique in its group.
    """

    name: str
    changes: Mapping[str, Mapping[str, Any]]
    place: KeyPath
    shown: str

    def origins(self, node_id: str) -> dict[tuple[str, ...], KeyPath]:
        """The place in the file of every value that the variant changes in a node, by the value's path in the node."""
        is_swept = self.place[0] == SWEEP
        paths = [path for path, _ in _cells(self.changes[node_id])]
        return {path: self.place if is_swept else (*self.place, node_id, *path) for path in paths}


@frozen
class Group:
    """A group of variants; every copy of a node takes one of them."""

    name: str
    variants: tuple[Variant, ...]

    @property
    def shown(self) -> str:
        """The group's name for users: `draft` of `for_each.draft`, `train.lr` of `sweep.train.lr`."""
        return self.name.partition(".")[2]


def put_sweeps(tree: Tree, texts: Sequence[str]) -> None:
    """Put each `--sweep node.field=[...]` into the table [sweep]; it replaces the file's sweep of that field."""
    given: set[str] = set()
    for text in texts:
        position = Position(f"--sweep {text}", is_argument=True)
        path, equals, value = (part.strip() for part in text.partition("="))
        try:
            values = typed_value(value, None)
        except ValueError as error:
            tree.mistakes.append(Finding(str(error), Field(position=position)))
            continue
        if not equals or path.count(".") < 1 or not all(path.split(".")):
            tree.mistakes.append(Finding("expected node.field=[value, value]", Field(position=position)))
        elif path in given:
            message = f"{shortened(path)} is swept twice"
            tree.mistakes.append(Finding(message, Field(position=position), "give all values at once"))
        else:
            tree.put((SWEEP, *path.split(".")), values, position)
        given.add(path)


def sort_of(tree: Tree) -> str:
    """The metric that `[sweep] sort` names; empty where it names none."""
    named = tree.table(SWEEP).get(SORT, "")
    if isinstance(named, str):
        return named
    if not isinstance(named, dict):  # which is a node of that name
        hint = 'sort = "eval/tau", "-train/loss" for the least first'
        tree.report((SWEEP, SORT), "expected the name of a metric", hint)
    return ""


def expand(tree: Tree) -> None:
    """Replace the nodes that sweeps and for_each copy by their copies."""
    groups = [*_written_groups(tree), *_swept_groups(tree)]
    if not groups:
        return
    expansion = _Expansion(tree, groups)
    expansion.report_unknown_nodes()
    if (count := expansion.count()) > MAX_COPIES:
        names = " x ".join(f"{group.name} ({len(group.variants)})" for group in groups)
        message = f"for_each and sweep make {count:,} nodes, more than {MAX_COPIES:,}: {names}"
        tree.report(groups[-1].variants[0].place, message)
    else:
        expansion.run()


def _written_groups(tree: Tree) -> Iterator[Group]:
    for name, variants in tree.table(FOR_EACH).items():
        place = (FOR_EACH, name)
        if not isinstance(variants, dict) or not variants:
            hint = f"[for_each.{shortened(name)}.<variant>] with node.field = value"
            tree.report(place, "a group has one table for each variant", hint)
            continue
        found = []
        for variant, changes in variants.items():
            if wrong := _wrong_variant(variant, changes):
                tree.report((*place, variant), wrong, "train.num_layers = 2")
            else:
                found.append(Variant(variant, changes, (*place, variant), variant))
        if found and not any(variant.changes for variant in found):
            tree.report(place, "no variant of this group changes a value")
        elif found:
            yield Group(f"for_each.{name}", tuple(found))


def _wrong_variant(name: str, changes: Any) -> str:
    if not NAME.fullmatch(name):
        return f'variant "{name}": letters, digits, "_" and "-" only, since it is a part of node ids'
    if not isinstance(changes, dict) or not all(isinstance(change, dict) for change in changes.values()):
        return "expected a table of node.field = value"
    return ""


def _swept_groups(tree: Tree) -> Iterator[Group]:
    for keys, values in leaves(tree.table(SWEEP)):
        node_id, *field = keys
        place = (SWEEP, *keys)
        if keys == (SORT,):
            continue
        if not field:
            tree.report(place, "expected node.field = [value, value]")
        elif not isinstance(values, (list, tuple)) or not values:
            tree.report(place, "expected a list of values, one for each copy", "[1e-3, 3e-4]")
        elif field == ["launch"] and not all(isinstance(value, dict) for value in values):
            message = "expected a list of tables, one for each copy"
            tree.report(place, message, "[{ threads = 1 }, { threads = 2 }]")
        elif len(set(map(toml_text, values))) < len(values):
            tree.report(place, "a value is given twice")
        else:
            names = _value_names(field[-1], values)
            variants = [
                Variant(name, {node_id: nested(field, value)}, place, toml_text(value))
                for name, value in zip(names, values, strict=True)
            ]
            yield Group(f"sweep.{'.'.join(keys)}", tuple(variants))


def _value_names(field: str, values: Iterable[Any]) -> list[str]:
    """Names of variants, from the field and its values, in characters of ids, all different: `lr_0_001`; `x_m1_0` for
    -1.0.
    """
    names: list[str] = []
    for number, value in enumerate(values, start=1):
        shown = re.sub(r"[^A-Za-z0-9-]+", "_", toml_text(value)).strip("_")
        shown = f"{'m' if NEGATIVE.match(shown) else ''}{shown.strip('_-')}"[:VALUE_LENGTH]
        name = f"{field}_{shown or number}"
        while name in names:
            name = f"{name}_{number}"
        names.append(name)
    return names


def nested(keys: Sequence[str], value: Any) -> dict[str, Any]:
    """The value in a table that holds it at these keys."""
    for key in reversed(keys):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def leaves(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values of a table by path; tables with keys are none themselves."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


class _Expansion:
    def __init__(self, tree: Tree, groups: Sequence[Group]) -> None:
        self.tree = tree
        self.groups = groups
        self.nodes = {node_id: table for node_id, table in tree.nodes.items() if isinstance(table, dict)}
        self.member_of = self._memberships()  # the groups of every node, in their order

    def report_unknown_nodes(self) -> None:
        for group in self.groups:
            places = {
                variant.place if variant.place[0] == SWEEP else (*variant.place, node_id): node_id
                for variant in group.variants
                for node_id in variant.changes
                if node_id not in self.tree.nodes
            }
            for place, node_id in places.items():
                message = f'there is no node "{shortened(node_id)}"'
                self.tree.report(place, message, known_nodes(node_id, self.tree.nodes))

    def count(self) -> int:
        return sum(math.prod(len(group.variants) for group in groups) for groups in self.member_of.values())

    def run(self) -> None:
        nodes: dict[str, Any] = {}
        for node_id, table in self.tree.nodes.items():
            groups = self.member_of.get(node_id, ())
            for chosen in itertools.product(*(group.variants for group in groups)):
                copy_id = "-".join([node_id, *(variant.name for variant in chosen)])
                if chosen and (copy_id in nodes or copy_id in self.tree.nodes):
                    message = f'the copy "{copy_id}" of node "{node_id}" would have the id of another node'
                    self.tree.report(chosen[-1].place, message, "rename one of them")
                    continue
                names = {group.name: variant.name for group, variant in zip(groups, chosen, strict=True)}
                changed = self._changed_table(node_id, table, chosen, copy_id) if chosen else table
                nodes[copy_id] = self._rewired_table(changed, names) if isinstance(changed, dict) else changed
                if chosen:
                    shown = {group.shown: each.shown for group, each in zip(groups, chosen, strict=True)}
                    self.tree.copies[copy_id] = Copy(node_id, shown)
        self.tree.values["node"] = nodes

    def _memberships(self) -> dict[str, tuple[Group, ...]]:
        parents = {node_id: list(dict.fromkeys(self._read_by(node_id))) for node_id in self.nodes}
        children = children_of(parents)
        users = self._users()
        member_of: dict[str, list[Group]] = {node_id: [] for node_id in self.nodes}
        for group in self.groups:
            cells = reached(self._changed(group, users), users)
            owners = {cell.partition(".")[0] for cell in cells}
            for node_id in reached(owners & self.nodes.keys(), children):
                member_of[node_id].append(group)
        return {node_id: tuple(groups) for node_id, groups in member_of.items()}

    def _read_by(self, node_id: str) -> Iterator[str]:
        op = self.tree.op(node_id)
        for table in self._tables_of(node_id):
            for name, value in table.items():
                if op is None or name in op.edges or "op" in table:
                    yield from (found for found in references(value) if found in self.nodes)

    def _users(self) -> dict[str, list[str]]:
        """A mapping from a field, "node.field" or "node.table.field", to the fields whose text refers to it."""
        users: dict[str, list[str]] = {}
        for node_id in self.nodes:
            for table in self._tables_of(node_id):
                for path, value in _cells(table):
                    for field in referred_fields(value):
                        users.setdefault(field, []).append(".".join((node_id, *path)))
        return users

    def _tables_of(self, node_id: str) -> list[Mapping[str, Any]]:
        """The tables that may set a node's values: its own, and those of variants."""
        variants = (variant.changes.get(node_id, {}) for group in self.groups for variant in group.variants)
        return [self.nodes[node_id], *variants]

    def _changed(self, group: Group, users: Mapping[str, Sequence[str]]) -> Iterator[str]:
        for variant in group.variants:
            for node_id, change in variant.changes.items():
                yield from (".".join((node_id, *path)) for path, _ in _cells(change))
                if "op" in change:  # all values of the node may be others
                    yield from (field for field in users if field.startswith(f"{node_id}."))

    def _changed_table(
        self, node_id: str, table: Mapping[str, Any], chosen: Sequence[Variant], copy_id: str
    ) -> Mapping[str, Any]:
        origins = self.tree.origins
        origins["node", copy_id] = (("node", node_id), None)
        for variant in chosen:
            change = variant.changes.get(node_id)
            if change is None:
                continue
            if "op" in change and change["op"] != table.get("op"):
                table = change
                origins["node", copy_id] = ((*variant.place, node_id), None)
            else:
                self._report_overridden(node_id, variant, copy_id)
                table = merged(table, change)
            for path, place in variant.origins(node_id).items():
                origins["node", copy_id, *path] = (place, None)
        return table

    def _report_overridden(self, node_id: str, variant: Variant, copy_id: str) -> None:
        """Report an argument that sets a value for all copies although the variant sets it."""
        for path, value in _cells(variant.changes[node_id]):
            for given in () if isinstance(value, dict) else {path, path[:1]}:
                _, position = self.tree.origins.get(("node", node_id, *given), (given, None))
                if position is None or any(position == other.position for other in self.tree.mistakes):
                    continue
                _, argument = self.tree.origin(variant.place)
                where = ".".join(map(str, variant.place)) if argument is None else argument.file
                hint = f"name one copy: -s {shortened(copy_id)}.{shortened('.'.join(path))}=..."
                message = f"{shortened(where)} sets this very value"
                self.tree.mistakes.append(Finding(message, Field(position=position), hint))

    def _rewired_table(self, table: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
        """The table of a copy, in which references to copied nodes lead to the copies of the same variants."""
        op = self.tree.find_op(table.get("op"))
        return {
            name: self._rewired(value, names, name != "launch" and (op is None or name in op.edges))
            for name, value in table.items()
        }

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
        """The id of a node's copy for the chosen variants; the node's own id where all copies share it.

        names: group -> the chosen variant. A group that does not touch the node is not part of the id.
        """
        groups = self.member_of.get(node_id, ())
        return "-".join([node_id, *(names.get(group.name, group.variants[0].name) for group in groups)])


def _cells(table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values of a table by path: (field,) for each, and (field, key) for those in nested tables."""
    for name, value in table.items():
        yield (name,), value
        if isinstance(value, dict):
            yield from (((name, key), each) for key, each in value.items())


def references(value: Any) -> Iterator[str]:
    """The ids of the nodes that an edge's value names."""
    members = value if isinstance(value, (list, tuple)) else [value]
    for member in members:
        if isinstance(member, Ref):
            yield member.node
        elif isinstance(member, str) and member.startswith("@"):
            yield member[1:]
