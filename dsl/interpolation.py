"""References in texts: `${env:NAME}`, `${node.field}`, `${node.table.field}`, `${pipeline.name}`, and secrets.

A text that is one reference as a whole takes the value with its type; within a longer text the value is put in as text.
`$${` is a literal `${`. Secrets stay as they are written (dsl/secrets.py). Chains of references may be long, so nothing
here calls itself along them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from dsl.convert import member_type, type_mistake, typed_value
from dsl.document import LAUNCH, TABLE_NAMES
from dsl.edge_checks import external_value
from dsl.errors import did_you_mean, shortened
from dsl.finding import Finding
from dsl.op import ConfigField, chosen_tables
from dsl.secrets import secret_names
from dsl.unchecked_node import WrittenNode, ops_of, table_values, unknown_key

OPENING = "${"
TOKEN = re.compile(r"(?P<escape>\$\$\{)(?=(?P<ahead>[^{}]*\}?))|\$\{(?P<body>[^{}$]*)(?P<end>\}?)")
ENVIRONMENT = re.compile(r"env:(\w+)", re.ASCII)
FIELD = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)\.((?:[A-Za-z_]\w*\.)?[A-Za-z_]\w*)", re.ASCII)
TRACKING_URI = ("mlflow", "tracking_uri")
OF_PIPELINE = ("name", "seed")
KINDS = "${node.field}, ${env:NAME}, ${secret:NAME}, ${pipeline.name} or ${pipeline.seed}"

Cell = tuple[str, str]  # a node's id or a table's name; "field", "table.field" or "launch.field"


class _Refused(Exception):
    """A reference that means nothing; hint as in Finding. Without a message it is reported elsewhere."""

    def __init__(self, message: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def interpolate(
    nodes: Mapping[str, WrittenNode], tables: Mapping[str, WrittenNode], only_arguments: bool = False
) -> list[Finding]:
    """Put values in place of all references. Returns what is wrong; values that are wrong are taken out.

    only_arguments: only in values that were given on the command line; all others are what they say.
    """
    return _Interpolation({**nodes, **tables}, only_arguments).run()


def has_reference(value: Any) -> bool:
    """Whether a text, or one in a list or table, holds `${`."""
    if isinstance(value, str):
        return OPENING in value
    if isinstance(value, dict):
        return any(has_reference(member) for member in value.values())
    return isinstance(value, (list, tuple)) and any(has_reference(member) for member in value)


def referred_fields(value: Any) -> Iterator[Cell]:
    """The fields that the texts of a value refer to, known or not."""
    for text in _texts(value):
        for token in TOKEN.finditer(text):
            found = None if token["escape"] else FIELD.fullmatch(token["body"])
            if found is not None:
                yield found[1], found[2]


class _Interpolation:
    def __init__(self, owners: Mapping[str, WrittenNode], only_arguments: bool) -> None:
        self.owners = owners
        self.copies: dict[str, list[str]] = {}
        for node in owners.values():
            if node.template:
                self.copies.setdefault(node.template, []).append(node.id)
        self.mistakes: list[Finding] = []
        self.refused: list[_Refused] = []  # of the value that is filled in at the moment
        self.waiting: dict[Cell, Any] = {}
        for owner, node in owners.items():
            cells = {(owner, name): value for name, value in node.cells() if has_reference(value)}
            cells |= {(owner, f"launch.{name}"): value for name, value in node.launch.items() if has_reference(value)}
            self.waiting |= {cell: cells[cell] for cell in cells if not only_arguments or node.is_argument(cell[1])}

    def run(self) -> list[Finding]:
        for first in list(self.waiting):
            path = {first: None} if first in self.waiting else {}  # cells that wait for the next one each
            while path:
                last = next(reversed(path))
                needed = next((cell for cell in self._needed(last) if cell in self.waiting), None)
                if needed is None:
                    del path[last]
                    self._finish(last)
                elif needed in path:
                    cells = list(path)
                    self._report_cycle(cells[cells.index(needed) :])
                    path = {cell: None for cell in cells if cell in self.waiting}
                else:
                    path[needed] = None
        return self.mistakes

    def _needed(self, cell: Cell) -> Iterator[Cell]:
        for owner, name in referred_fields(self.waiting[cell]):
            for copy in self._ids(owner):
                yield copy, name
                yield copy, name.partition(".")[0]
                field = self.owners[copy].field(name)
                yield from ((copy, f"{name}.{key}") for key in (field.fields if field is not None else ()))

    def _ids(self, owner: str) -> list[str]:
        """The node itself, or its copies where a table outside the nodes names a node that was copied."""
        return [owner] if owner in self.owners else self.copies.get(owner, [])

    def _finish(self, cell: Cell) -> None:
        value = self.waiting.pop(cell)
        node = self.owners[cell[0]]
        self.refused = []
        filled = self._filled(value, self._type_of(cell), cell)
        if not self.refused:
            self._store(cell, filled)
            return
        self._take_out(cell)
        wrong = dict.fromkeys((refused.message, refused.hint) for refused in self.refused if refused.message)
        self.mistakes += [node.mistake(cell[1], *each) for each in wrong]

    def _report_cycle(self, cells: list[Cell]) -> None:
        names = [".".join(cell) for cell in cells]
        node = self.owners[cells[0][0]]
        message = f"the values refer to each other: {' -> '.join([*names, names[0]])}"
        self.mistakes.append(node.mistake(cells[0][1], message))
        for cell in cells:
            del self.waiting[cell]
            self._take_out(cell)

    def _store(self, cell: Cell, value: Any) -> None:
        values, key = self._holder(cell)
        values[key] = value

    def _take_out(self, cell: Cell) -> None:
        values, key = self._holder(cell)
        del values[key]
        self.owners[cell[0]].wrong.add(cell[1])

    def _holder(self, cell: Cell) -> tuple[dict[str, Any], str]:
        """What holds the value, and its key there; of a table a copy, which may be changed, takes its place."""
        node = self.owners[cell[0]]
        table, _, key = cell[1].rpartition(".")
        if table and table != LAUNCH:
            node.values[table] = dict(node.values[table])
            return node.values[table], key
        return (node.launch if table else node.values), key

    def _type_of(self, cell: Cell) -> Any:
        field = self.owners[cell[0]].field(cell[1])
        return str if field is None else field.type

    def _filled(self, value: Any, expected: Any, cell: Cell) -> Any:
        if isinstance(value, str):
            return self._filled_text(value, expected, cell) if OPENING in value else value
        if isinstance(value, dict):
            of_member = member_type(expected, dict)
            return {key: self._filled(member, of_member, cell) for key, member in value.items()}
        if isinstance(value, (list, tuple)):
            of_member = member_type(expected, tuple)
            return type(value)(self._filled(member, of_member, cell) for member in value)
        return value

    def _filled_text(self, text: str, expected: Any, cell: Cell) -> Any:
        """What is refused is put down, and stays as it is written."""
        whole = TOKEN.fullmatch(text)
        if whole is not None and not whole["escape"]:
            return self._or_refused(whole, lambda token: self._as_whole(token, expected, cell))
        return TOKEN.sub(lambda token: str(self._or_refused(token, lambda token: self._as_text(token, cell))), text)

    def _or_refused(self, token: re.Match[str], meaning: Callable[[re.Match[str]], Any]) -> Any:
        try:
            return meaning(token)
        except _Refused as refused:
            self.refused.append(refused)
            return token[0]

    def _as_whole(self, token: re.Match[str], expected: Any, cell: Cell) -> Any:
        value = self._meaning(token, expected, cell)
        variable = ENVIRONMENT.fullmatch(token["body"])
        if variable is None or secret_names(token[0]) or self.owners[cell[0]].field(cell[1]) is None:
            return value
        message = type_mistake(expected, value)
        if message is not None:
            takes_text = type_mistake(expected, os.environ[variable[1]]) is None
            hint = f"as a text it has quotes of its own: {variable[1]}='\"...\"'" if takes_text else ""
            raise _Refused(f"{token[0]}: {message}", hint)
        return value

    def _as_text(self, token: re.Match[str], cell: Cell) -> str:
        if token["escape"]:  # what would be a secret keeps its second $ until the stage runs
            is_secret = secret_names(OPENING + token["ahead"]) and (cell[0] not in TABLE_NAMES or cell == TRACKING_URI)
            return token[0] if is_secret else OPENING
        value = self._meaning(token, str, cell)
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, (str, int, float)):
            return str(value)
        kind = "none" if value is None else {dict: "a table"}.get(type(value), "a list")
        raise _Refused(f"{token[0]} is {kind}, which cannot be part of a string")

    def _meaning(self, token: re.Match[str], expected: Any, cell: Cell) -> Any:
        body = token["body"]
        if not token["end"]:
            raise _Refused(f'"{token[0]}" has no closing brace', "a literal ${ is written $${")
        if secret_names(token[0]):
            if cell[0] in TABLE_NAMES and cell != TRACKING_URI:
                raise _Refused("secrets are allowed only in a node's values and in mlflow.tracking_uri")
            if cell == TRACKING_URI:
                _from_environment(secret_names(token[0])[0], str)
            return token[0]
        environment = ENVIRONMENT.fullmatch(body)
        if environment is not None:
            return _from_environment(environment[1], expected)
        field = FIELD.fullmatch(body)
        if field is None:
            raise _Refused(f'"{token[0]}" is not one of {KINDS}', "a literal ${ is written $${")
        values = [self._value_of(owner, field[2], cell) for owner in self._ids(field[1]) or [field[1]]]
        if any(value != values[0] for value in values):
            copies = ", ".join(self._ids(field[1]))
            raise _Refused(f"{token[0]} has a different value in each copy ({copies})", "name one of them")
        return values[0]

    def _value_of(self, owner: str, name: str, cell: Cell) -> Any:
        node = self.owners.get(owner)
        if owner in TABLE_NAMES and (owner != "pipeline" or name not in OF_PIPELINE):
            hint = did_you_mean(name, OF_PIPELINE) if owner == "pipeline" else ""
            raise _Refused(f"${{{owner}.{name}}} is not one of {KINDS}", hint)
        if node is None:
            raise _Refused(f'there is no node "{owner}"', did_you_mean(owner, [*self.owners]))
        field = node.field(name)
        if field is None and node.op is None:
            raise _Refused
        if field is None:
            if name in node.edges:
                raise _Refused(f'node "{owner}": "{name}" reads another node, it has no value')
            hint = unknown_key(node, name, ops_of(self.owners), fields_only=True).text
            raise _Refused(f'node "{owner}" has no field "{shortened(name)}"', hint)
        table, _, key = name.rpartition(".")
        if not node.wrong.isdisjoint((name, table)):
            raise _Refused
        values = self._values_of(node, table)
        value = attrs.NOTHING if values is None else values.get(key, _default(field))
        if value is attrs.NOTHING:
            if owner == "pipeline":
                raise _Refused
            raise _Refused(f'node "{owner}" has no value for {name}')
        if type_mistake(field.type, value) is not None:
            raise _Refused  # reported at that field
        if name == "seed" and value is None:
            return self._value_of("pipeline", "seed", cell)
        return self._as_seen_from(value, field, node, cell)

    @staticmethod
    def _values_of(node: WrittenNode, table: str) -> Mapping[str, Any] | None:
        """Those of the node, of its launch, or of a table in it; None where that is neither given nor chosen."""
        if table in ("", LAUNCH):
            return node.launch if table else node.values
        default = {} if table in chosen_tables(node.fields, node.values) else _default(node.fields[table])
        given = node.values.get(table)
        return table_values(default if given is None else given)

    def _as_seen_from(self, value: Any, field: ConfigField, node: WrittenNode, cell: Cell) -> Any:
        """A path that stands in another folder's file is made absolute."""
        folder = node.places.folder(field.name) if field.external else None
        here = self.owners[cell[0]].places.folder(cell[1])
        return value if folder is None or folder == here else external_value(value, field, folder)


def _from_environment(name: str, expected: Any) -> Any:
    if name not in os.environ:
        hint = did_you_mean(name, list(os.environ)) or "export it before you call dflow"
        raise _Refused(f"the environment variable {name} is not set", hint)
    try:
        return typed_value(os.environ[name], expected)
    except ValueError:
        return os.environ[name]


def _default(field: ConfigField) -> Any:
    return field.default.factory() if isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type]


def _texts(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        member = pending.pop()
        if isinstance(member, str):
            yield member
        elif isinstance(member, (list, tuple)):
            pending += reversed(member)
        elif isinstance(member, dict):
            pending += reversed(list(member.values()))
