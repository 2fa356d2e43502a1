"""Make the config and the launch of a node, or find every mistake in its values at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import define

from dsl.convert import UNKNOWN, Checked, KeyHint, checked, type_mistake
from dsl.edge_checks import external_value
from dsl.finding import Finding
from dsl.launch import Launch
from dsl.op import ConfigField, Edge, OpSpec, checked_config, chosen_tables, with_tables
from dsl.op_table import unknown_op
from dsl.shown import shown_value
from dsl.tables import CLASSES, LAUNCH, LAUNCH_FIELD
from dsl.toml import KeyPath
from dsl.tree import Tree, cells, owner_path

LAUNCH_FIELDS = LAUNCH_FIELD.fields
TORCHRUN_HOSTS = ("nnodes", "rendezvous")  # torchrun's own names for what `hosts` of kind = "ray" does


@define
class NodeCheck:
    """A node, or a table beside the nodes, without an op.

    values: what was given and is right, of its fields' types, paths as they were written. wrong: the names of fields
    whose values are not. made: the config, or the object of a table. launch, made_launch: the same of a node's launch.
    """

    tree: Tree
    id: str
    op: OpSpec | None = None
    values: dict[str, Any] = attrs.Factory(dict)
    wrong: set[str] = attrs.Factory(set)
    launch: dict[str, Any] = attrs.Factory(dict)
    made: Any = None
    made_launch: Launch | None = None

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
        table, _, key = field.partition(".")
        is_inside = key and (table == LAUNCH or (table in self.fields and self.fields[table].table is not None))
        return (*owner_path(self.id), *((table, key) if is_inside else filter(None, (field,))))

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
    node = NodeCheck(tree, node_id, tree.op(node_id))
    table = tree.nodes[node_id]
    if not isinstance(table, dict):
        node.report("", "expected a table", f"[node.{node_id}]")
    elif node.op is None:
        _report_op(node, table)
    else:
        given = {name: value for name, value in table.items() if name != "op"}
        launch = given.pop(LAUNCH, {})
        _check_config(node, node.op, given, seed)
        _check_launch(node, launch)
    return node


def check_table(tree: Tree, name: str) -> NodeCheck:
    """A table beside the nodes."""
    table = NodeCheck(tree, name)
    if name in tree.values:  # a missing table is reported by itself
        found = checked(CLASSES[name], tree.table(name), owner=name)
        table.values, table.wrong, table.made = found.values, found.wrong, found.made
        _report(table, found)
    return table


def _check_config(node: NodeCheck, op: OpSpec, given: dict[str, Any], seed: int) -> None:
    values = dict(given)
    for name, field in op.fields.items():
        value = given.get(name, field.default)
        if field.external and value is not attrs.NOTHING and type_mistake(field.type, value) is None:
            values[name] = external_value(value, field, node.folder(name))
    if "seed" in op.fields and given.get("seed") is None:
        values["seed"] = seed
    found = checked_config(op, values)
    written = {*given, *chosen_tables(op.fields, given)}
    node.values = {
        name: given[name] if name in op.fields and op.fields[name].external else value
        for name, value in found.values.items()
        if name in written
    }
    node.wrong, node.made = found.wrong, found.made
    _report(node, found)


def _check_launch(node: NodeCheck, given: Any) -> None:
    if not isinstance(given, dict):
        if given is not attrs.NOTHING:
            node.report(LAUNCH, "expected a table", "launch = { nproc = 2 }")
        return
    given = dict(given)
    _report_several_hosts(node, given)
    found = checked(Launch, given, owner=LAUNCH)
    node.launch, node.made_launch = found.values, found.made
    _report(node, found, LAUNCH)


def _report(node: NodeCheck, found: Checked, table: str = "") -> None:
    """Report the mistakes in the values of a node, or of a table in it."""
    prefix = f"{table}." if table else ""
    for mistake in found.mistakes:
        field = prefix + mistake.path if mistake.path else table
        advice = mistake.advice
        if mistake.code == UNKNOWN:
            advice = unknown_key(node.tree, node.id, field).text
        elif mistake.path in found.clashes and not advice:
            advice = _unset_hint(node, field, [prefix + each for each in found.clashes[mistake.path]])
        node.report(field, mistake.what, advice)


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
            return KeyHint(f'it is "{key}" of the node, not of its table {table}')
        return aliases.key_hint(key, f"{called}.{table}", [*fields[table].fields], ops)
    return aliases.key_hint(name, called, [*(() if fields_only else edges), *with_tables(fields)], ops)


def _report_op(node: NodeCheck, table: Mapping[str, Any]) -> None:
    name = table.get("op")
    if "op" not in table:
        node.report("", 'the required key "op" is missing', "the ops: dflow ops")
    elif not isinstance(name, str) and name is not attrs.NOTHING:
        node.report("op", f"expected the name of an op, got {shown_value(name)}")
    elif isinstance(name, str) and node.tree.knows_all_ops:
        unknown = unknown_op(name, node.tree.op_files)
        node.report("op", unknown.what, unknown.advice)


def _report_several_hosts(node: NodeCheck, launch: dict[str, Any]) -> None:
    """The fields by which torchrun names several machines, as one mistake; they are taken out."""
    given = {name: launch.pop(name) for name in TORCHRUN_HOSTS if name in launch}
    if given:
        hosts = given.get("nnodes")
        hint = f'set kind = "ray" and hosts = {hosts if isinstance(hosts, int) else 2} instead; see docs/cluster.md'
        message = "ranks on several machines are started by Ray, not by torchrun"
        node.report(f"{LAUNCH}.{next(iter(given))}", message, hint)


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
