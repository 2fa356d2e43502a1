"""Make the config and the launch of a node, or find every mistake in its values at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import define

from dsl.convert import readable, structure, type_name
from dsl.edge_checks import external_value
from dsl.errors import ConfigError, StructureError
from dsl.field_rules import ChosenBy, Clash, validators_of
from dsl.finding import Finding
from dsl.launch import Launch
from dsl.op import ConfigField, Edge, OpSpec, chosen_tables, with_tables
from dsl.op_table import unknown_op
from dsl.shown import shown_value
from dsl.tables import CLASSES, LAUNCH, LAUNCH_FIELD
from dsl.toml import KeyPath
from dsl.tree import Tree, cells, owner_path, table_values

if TYPE_CHECKING:
    from dsl.aliases import KeyHint

LAUNCH_FIELDS = LAUNCH_FIELD.fields
TORCHRUN_HOSTS = ("nnodes", "rendezvous")  # torchrun's own names for what `hosts` of kind = "ray" does


@define
class NodeCheck:
    """A node, or a table beside the nodes, without an op.

    values: what was given, of its fields' types, paths as they were written; what is wrong is taken out and named in
    `wrong` ("field", "table.field", "launch.field"). made: the config and the launch, where nothing is wrong.
    """

    tree: Tree
    id: str
    op: OpSpec | None = None
    values: dict[str, Any] = attrs.Factory(dict)
    wrong: set[str] = attrs.Factory(set)
    launch: dict[str, Any] = attrs.Factory(dict)
    made: tuple[Any, Launch] | None = None

    @property
    def fields(self) -> Mapping[str, ConfigField]:
        return self.tree.fields(self.id) if self.op is None else self.op.fields

    @property
    def edges(self) -> Mapping[str, Edge]:
        return {} if self.op is None else self.op.edges

    def cells(self) -> Iterator[tuple[str, Any]]:
        """The values by "field"; those in a table by "table.field"."""
        return ((".".join(path), value) for path, value in cells(self.values, self.fields))

    def path(self, field: str = "") -> KeyPath:
        return (*owner_path(self.id), *(field.split(".") if field else ()))

    def folder(self, field: str) -> Path:
        """The folder that a relative path in the field starts from."""
        return self.tree.folder(self.path(field))

    def is_argument(self, field: str) -> bool:
        """Whether the value of the field was given on the command line."""
        return self.tree.is_argument(self.path(field))

    def mistake(self, field: str, message: str, hint: str = "") -> Finding:
        """A mistake at a field; "" for the node itself."""
        return self.tree.mistake(self.path(field), message, hint)

    def report(self, field: str, message: str, hint: str = "") -> None:
        self.tree.report(self.path(field), message, hint)


def check_node(tree: Tree, node_id: str, seed: int) -> NodeCheck:
    """seed: the pipeline's, for a node that gives none of its own."""
    node = NodeCheck(tree, node_id, tree.op(node_id), wrong=set(tree.wrong.get(node_id, ())))
    table = tree.nodes[node_id]
    if not isinstance(table, dict):
        node.report("", "expected a table", f"[node.{node_id}]")
    elif node.op is None:
        _report_op(node, table)
    else:
        node.values = {name: value for name, value in table.items() if name != "op"}
        error = "" if node.wrong else _make(node, node.op, seed)
        if node.made is None:
            _find_mistakes(node, node.op, error)
    return node


def check_table(tree: Tree, name: str) -> NodeCheck:
    """A table beside the nodes, of which no config is made."""
    table = NodeCheck(tree, name, values=dict(tree.table(name)), wrong=set(tree.wrong.get(name, ())))
    if name in tree.values:  # a missing table is reported by itself
        _check_values(table, "", table.values, CLASSES[name], table.fields)
    return table


def unknown_key(tree: Tree, owner: str, name: str, fields_only: bool = False) -> KeyHint:
    """What to say of a key ("table.key" and "launch.key" too) that a node or table does not have.

    fields_only: an edge cannot be meant.
    """
    from dsl import aliases  # only for mistakes

    op = tree.op(owner)
    fields, edges = (tree.fields(owner), {}) if op is None else (op.fields, op.edges)
    called = owner if op is None else op.name
    ops = {tree.template(each): found.name for each in tree.nodes if (found := tree.op(each)) is not None}
    table, _, key = name.partition(".")
    if key and table == LAUNCH:
        return aliases.key_hint(key, LAUNCH, [*LAUNCH_FIELDS], ops)
    if key and table in fields:
        if key in fields or key in edges:
            return aliases.KeyHint(f'it is "{key}" of the node, not of its table {table}')
        return aliases.key_hint(key, f"{called}.{table}", [*fields[table].fields], ops)
    return aliases.key_hint(name, called, [*(() if fields_only else edges), *with_tables(fields)], ops)


def _report_op(node: NodeCheck, table: Mapping[str, Any]) -> None:
    name = table.get("op")
    if "op" not in table:
        node.report("", 'the required key "op" is missing', "the ops: dflow ops")
    elif not isinstance(name, str):
        node.report("op", f"expected the name of an op, got {shown_value(name)}")
    elif node.tree.knows_all_ops:
        unknown = unknown_op(name, node.tree.op_files)
        node.report("op", unknown.what, unknown.advice)


def _make(node: NodeCheck, op: OpSpec, seed: int) -> str:
    """Make config and launch, which structures and validates the values once. Returns what was raised."""
    values = dict(node.values)
    launch = values.pop(LAUNCH, {})
    externals = {
        name: field
        for name, field in op.fields.items()
        if field.external and not (field.required and name not in values)
    }
    made = {
        name: external_value(values.get(name, field.default), field, node.folder(name))
        for name, field in externals.items()
    }
    if "seed" in op.fields and values.get("seed") is None:
        made["seed"] = seed
    try:
        config = op.config_class(**{**values, **made})
        node.made = config, structure(Launch, launch)
    except (ConfigError, StructureError, ArithmeticError, TypeError) as error:
        return str(error)
    node.launch = attrs.asdict(node.made[1])
    given = [*values, *chosen_tables(op.fields, values)]
    node.values = {name: values[name] if name in externals else getattr(config, name) for name in given}
    return ""


def _find_mistakes(node: NodeCheck, op: OpSpec, error: str) -> None:
    """Check the values one by one. error: what is wrong with the node as a whole, where no single value is."""
    known = len(node.tree.mistakes)
    launch = node.values.pop(LAUNCH, {})
    node.launch = dict(launch) if isinstance(launch, dict) else {}
    _check_values(node, "", node.values, op.config_class, op.fields)
    if isinstance(launch, dict):
        _check_values(node, f"{LAUNCH}.", node.launch, Launch, LAUNCH_FIELDS)
    else:
        node.report(LAUNCH, "expected a table", "launch = { nproc = 2 }")
    if error and len(node.tree.mistakes) == known:
        node.report("", error)


def _check_values(
    node: NodeCheck, prefix: str, table: dict[str, Any], cls: type, fields: Mapping[str, ConfigField]
) -> None:
    """Of a node's own values, or with the prefix "table." of a table in it, "launch." too; wrong ones are taken out."""
    edges = {} if prefix else node.edges
    suggested: set[str] = set()
    if prefix == f"{LAUNCH}.":
        _report_several_hosts(node, table)
    table |= {name: {} for name in chosen_tables(fields, table) if prefix + name not in node.wrong}
    written = {*table, *(name.removeprefix(prefix) for name in node.wrong if name.startswith(prefix))}
    wrong_tables: dict[str, Any] = {}
    for name, value in list(table.items()):
        declared = edges.get(name) or fields.get(name)
        if declared is None:
            hint = unknown_key(node.tree, node.id, prefix + name)
            suggested.add(hint.key)
            place = (*node.path(prefix.removesuffix(".")), name)
            node.tree.report(place, "unknown key", hint.text)
            del table[name]
            continue
        of_table = fields[name].table if name in fields else None
        inside = table_values(value) if of_table is not None else None
        if of_table is not None and inside is not None:
            value, below, known = dict(inside), f"{prefix}{name}.", len(node.tree.mistakes)
            _check_values(node, below, value, of_table, fields[name].fields)
            if len(node.tree.mistakes) > known or any(each.startswith(below) for each in node.wrong):
                wrong_tables[name] = table.pop(name)
                continue
        try:
            table[name] = declared.structure(value)
        except StructureError as error:
            node.report(prefix + name, "; ".join(map(str, error.mistakes)))
            node.wrong.add(prefix + name)
            del table[name]
    for name, refusal in _refused_by_validators({**table, **wrong_tables}, cls, written - set(table)).items():
        given = [prefix + each for each in refusal.others if each in written] if isinstance(refusal, Clash) else []
        node.report(prefix + name, readable(refusal), _unset_hint(node, prefix + name, given))
        node.wrong.add(prefix + name)
        table.pop(name, None)
    for attribute in attrs.fields(cls):
        name = attribute.name
        if attribute.default is attrs.NOTHING and name not in written and name not in suggested:
            what = _missing_edge(edges[name]) if name in edges else type_name(fields[name].type)
            node.report(prefix.removesuffix("."), f'the required key "{name}" is missing', what)


def _report_several_hosts(node: NodeCheck, launch: dict[str, Any]) -> None:
    """The fields by which torchrun names several machines, as one mistake; they are taken out."""
    given = {name: launch.pop(name) for name in TORCHRUN_HOSTS if name in launch}
    if given:
        hosts = given.get("nnodes")
        hint = f'set kind = "ray" and hosts = {hosts if isinstance(hosts, int) else 2} instead; see docs/cluster.md'
        message = "ranks on several machines are started by Ray, not by torchrun"
        node.report(f"{LAUNCH}.{next(iter(given))}", message, hint)


def _missing_edge(edge: Edge) -> str:
    example = '["@node", ...]' if edge.many else '"@node"'
    return f"{edge.wanted}: {example}"


def _unset_hint(node: NodeCheck, name: str, others: Sequence[str]) -> str:
    """How to unset what the file sets where an argument excludes it; empty where only one of them sets both sides."""
    if node.is_argument(name):
        of_file = [other for other in others if not node.is_argument(other)]
    else:
        of_file = [name] if any(map(node.is_argument, others)) else []
    if not of_file:
        return ""
    set_at = [f"{node.tree.position(node.path(field)) or 'the pipeline'} sets {field}" for field in of_file]
    template = node.tree.template(node.id)
    unset = " ".join(f"-s {template}.{field}=none" for field in of_file)
    return f"{' and '.join(set_at)}; unset with {unset}"


def _refused_by_validators(values: Mapping[str, Any], cls: type, wrong: Set[str]) -> dict[str, Exception]:
    """What each field's validator has against its value. A validator sees the other fields as far as they are known.

    wrong are fields that were given with a value that is known to be none: they have not their default either. Of a
    table among them it is only asked whether it is the chosen one.
    """
    validated = [each for each in attrs.fields(cls) if each.validator is not None and each.name in values]
    if not validated:
        return {}
    stand_in: Any = object.__new__(cls)
    for attribute in attrs.fields(cls):
        value = values.get(attribute.name, attribute.default)
        is_known = value is not attrs.NOTHING and attribute.name not in wrong
        if is_known and not isinstance(value, attrs.Factory):  # type: ignore[arg-type]
            object.__setattr__(stand_in, attribute.name, value)
    refused: dict[str, Exception] = {}
    for attribute in validated:
        rules = validators_of(attribute.validator) if attribute.name in wrong else ()
        validator = next((each for each in rules if isinstance(each, ChosenBy)), attribute.validator)
        try:
            validator(stand_in, attribute, values[attribute.name])
        except AttributeError:
            continue  # it asks for a field that is itself wrong or missing; the constructor validates again
        except (ArithmeticError, ValueError, TypeError, ConfigError) as error:
            refused[attribute.name] = error
    return refused
