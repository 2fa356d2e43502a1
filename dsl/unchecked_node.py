"""A node as it was written, and the checks of its values one by one, so that every mistake is found at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import attrs
from attrs import define

from dsl.convert import readable, type_name
from dsl.document import LAUNCH, Places
from dsl.errors import ConfigError, StructureError
from dsl.field_rules import ChosenBy, Clash, validators_of
from dsl.finding import Field, Finding, Position
from dsl.op import ConfigField, Edge, OpSpec, chosen_tables, config_fields, with_tables
from dsl.pipeline import Copy, Launch, Pipeline

if TYPE_CHECKING:
    from dsl.aliases import KeyHint

LAUNCH_FIELDS = config_fields(Launch)
DEFAULT_LAUNCH = Launch()
TORCHRUN_HOSTS = ("nnodes", "rendezvous")  # torchrun's own names for what `hosts` of kind = "ray" does


@define
class WrittenNode:
    """Values of a node's fields and edges as far as they are known; op is None where the op is unknown.

    A table outside the nodes, such as `[pipeline]`, is one too, without an op: table_fields are its fields. wrong: the
    fields ("table.field" and "launch.field" too) that were given, but are reported as wrong already. keys outside the
    op's fields and edges are mistakes. copy: the written node that this one is a copy of, and which.
    """

    id: str
    op: OpSpec | None
    values: dict[str, Any]
    launch: dict[str, Any]
    places: Places
    copy: Copy | None = None
    wrong: set[str] = attrs.Factory(set)
    table_fields: Mapping[str, ConfigField] = attrs.Factory(dict)

    @property
    def template(self) -> str:
        """The id of the written node that this one is a copy of; empty for one that is none."""
        return "" if self.copy is None else self.copy.template

    @property
    def fields(self) -> Mapping[str, ConfigField]:
        return self.table_fields if self.op is None else self.op.fields

    @property
    def edges(self) -> Mapping[str, Edge]:
        return {} if self.op is None else self.op.edges

    def field(self, name: str) -> ConfigField | None:
        """The declaration of "field", "table.field" or "launch.field"; None where there is none."""
        table, _, key = name.rpartition(".")
        if table == LAUNCH:
            return LAUNCH_FIELDS.get(key)
        if not table:
            return self.fields.get(name)
        return self.fields[table].fields.get(key) if table in self.fields else None

    def cells(self) -> Iterator[tuple[str, Any]]:
        """The values by "field"; of a table those in it, by "table.field"."""
        fields = self.fields
        for name, value in self.values.items():
            field = fields.get(name)
            inside = table_values(value) if field is not None and field.table is not None else None
            if inside is None:
                yield name, value
            else:
                yield from ((f"{name}.{key}", each) for key, each in inside.items())

    def is_argument(self, field: str) -> bool:
        """Whether the value of the field was given on the command line."""
        position = self.places.position(field)
        return isinstance(position, Position) and position.is_argument

    def mistake(self, field: str, message: str, hint: str = "") -> Finding:
        """A mistake at a field ("" for the node itself), with the field's position where it is known."""
        position = self.places.position(field)
        path = self.places.path(field)
        if position is not None and position.is_argument:
            path = path.removeprefix("node.")
            argument = position.file.partition(" ")[2]
            path = "" if argument.partition("=")[0].strip() in (path, f"{self.id}.{field}") else path
        return Finding(message, Field(path, position), hint)


def table_values(value: Any) -> dict[str, Any] | None:
    """The values in a table, which is an object or as TOML has it; None for what is no table."""
    if isinstance(value, dict):
        return value
    return attrs.asdict(value, recurse=False) if attrs.has(type(value)) else None


def written_nodes(pipeline: Pipeline) -> dict[str, WrittenNode]:
    """The nodes of a pipeline as if they had been written out in full."""
    return {
        node.id: WrittenNode(
            id=node.id,
            op=node.op,
            values={
                attribute.name: getattr(node.config, attribute.name)
                for attribute in attrs.fields(type(node.config))
                if not (node.takes_seed and attribute.name == "seed")
            },
            launch=attrs.asdict(node.launch),
            places=node.places if node.places.table else Places(table=("node", node.id)),
            copy=node.copy,
        )
        for node in pipeline.nodes.values()
    }


def ops_of(nodes: Mapping[str, WrittenNode]) -> dict[str, str]:
    """Node id, of a copy that of the node in the file -> the node's op, where it is known."""
    return {node.template or node.id: node.op.name for node in nodes.values() if node.op is not None}


def unknown_key(node: WrittenNode, name: str, ops: Mapping[str, str], fields_only: bool = False) -> KeyHint:
    """What to say of a key ("table.key" and "launch.key" too) that a node or table does not have.

    ops: those of all nodes, by id. fields_only: an edge cannot be meant.
    """
    from dsl import aliases  # only for mistakes

    owner = node.id if node.op is None else node.op.name
    table, _, key = name.partition(".")
    if key and table == LAUNCH:
        return aliases.key_hint(key, LAUNCH, [*LAUNCH_FIELDS], ops)
    if key and table in node.fields:
        if key in node.fields or key in node.edges:
            return aliases.KeyHint(f'it is "{key}" of the node, not of its table {table}')
        return aliases.key_hint(key, f"{owner}.{table}", [*node.fields[table].fields], ops)
    return aliases.key_hint(name, owner, [*(() if fields_only else node.edges), *with_tables(node.fields)], ops)


def add_checked_node(pipeline: Pipeline, node: WrittenNode, ops: Mapping[str, str]) -> list[Finding]:
    """Check the values of a node; without mistakes it is added to the pipeline. ops: those of all nodes, by id.

    Values become those of their fields' types; those with a mistake are taken out of the node.
    """
    if node.op is None:
        return []
    mistakes = _check_table(node, "", node.values, node.op.config_class, node.fields, ops)
    if node.launch:
        mistakes += _several_hosts(node)
        mistakes += _check_table(node, f"{LAUNCH}.", node.launch, Launch, LAUNCH_FIELDS, ops)
    if mistakes or node.wrong:
        return mistakes
    try:
        launch = Launch(**node.launch) if node.launch else DEFAULT_LAUNCH
    except ValueError as error:
        return [node.mistake("launch", str(error))]
    try:
        config = node.op.config_class(**node.values)
        pipeline.node(node.id, config, launch=launch, places=node.places, copy=node.copy)
    except ConfigError as error:
        return [node.mistake("", str(error))]
    return []


def _several_hosts(node: WrittenNode) -> list[Finding]:
    """The fields by which torchrun names several machines, as one mistake; they are taken out."""
    found = [name for name in TORCHRUN_HOSTS if name in node.launch]
    hosts = node.launch.get("nnodes", 2)
    for name in found:
        del node.launch[name]
    if not found:
        return []
    hint = f'set kind = "ray" and hosts = {hosts if isinstance(hosts, int) else 2} instead; see docs/cluster.md'
    return [node.mistake(f"launch.{found[0]}", "ranks on several machines are started by Ray, not by torchrun", hint)]


def table_mistakes(table: WrittenNode, cls: type, ops: Mapping[str, str]) -> list[Finding]:
    """Mistakes in a table that is to become an object of an attrs class, not a node; wrong values are taken out."""
    return _check_table(table, "", table.values, cls, table.fields, ops)


def _check_table(
    node: WrittenNode,
    prefix: str,
    table: dict[str, Any],
    cls: type,
    fields: Mapping[str, ConfigField],
    ops: Mapping[str, str],
) -> list[Finding]:
    """Of a node's own values, or with the prefix "table." of a table in it, "launch." too; wrong ones are taken out."""
    edges = {} if prefix else node.edges
    mistakes = []
    suggested: set[str] = set()
    table |= {name: {} for name in chosen_tables(fields, table) if prefix + name not in node.wrong}
    written = {*table, *(name.removeprefix(prefix) for name in node.wrong if name.startswith(prefix))}
    wrong_tables: dict[str, Any] = {}
    for name, value in list(table.items()):
        declared = edges.get(name) or fields.get(name)
        if declared is None:
            hint = unknown_key(node, prefix + name, ops)
            suggested.add(hint.key)
            mistakes.append(node.mistake(prefix + name, "unknown key", hint.text))
            del table[name]
            continue
        of_table = fields[name].table if name in fields else None
        inside = table_values(value) if of_table is not None else None
        if of_table is not None and inside is not None:
            inside = dict(inside)
            below = f"{prefix}{name}."
            wrong = _check_table(node, below, inside, of_table, fields[name].fields, ops)
            mistakes += wrong
            if wrong or any(each.startswith(below) for each in node.wrong):
                wrong_tables[name] = table.pop(name)
                continue
            value = inside
        try:
            table[name] = declared.structure(value)
        except StructureError as error:
            mistakes.append(node.mistake(prefix + name, "; ".join(map(str, error.mistakes))))
            node.wrong.add(prefix + name)
            del table[name]
    for name, refusal in _refused_by_validators({**table, **wrong_tables}, cls, written - set(table)).items():
        given = [prefix + each for each in refusal.others if each in written] if isinstance(refusal, Clash) else []
        unset = _unset_hint(node, prefix + name, given)
        mistakes.append(node.mistake(prefix + name, readable(refusal), unset))
        node.wrong.add(prefix + name)
        table.pop(name, None)
    for attribute in attrs.fields(cls):
        name = attribute.name
        if attribute.default is attrs.NOTHING and name not in written and name not in suggested:
            what = _missing_edge(edges[name]) if name in edges else type_name(fields[name].type)
            mistakes.append(node.mistake(prefix.removesuffix("."), f'the required key "{name}" is missing', what))
    return mistakes


def _missing_edge(edge: Edge) -> str:
    example = '["@node", ...]' if edge.many else '"@node"'
    return f"{edge.wanted}: {example}"


def _unset_hint(node: WrittenNode, name: str, others: Sequence[str]) -> str:
    """How to unset what the file sets where an argument excludes it; empty where only one of them sets both sides."""
    if node.is_argument(name):
        of_file = [other for other in others if not node.is_argument(other)]
    else:
        of_file = [name] if any(map(node.is_argument, others)) else []
    if not of_file:
        return ""
    set_at = [f"{node.places.position(field) or 'the pipeline'} sets {field}" for field in of_file]
    unset = " ".join(f"-s {node.template or node.id}.{field}=none" for field in of_file)
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
