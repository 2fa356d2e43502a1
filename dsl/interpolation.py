"""References in texts: `${env:NAME}`, `${node.field}`, `${node.table.field}`, `${pipeline.name}`, and secrets.

A text that is one reference as a whole takes the value with its type; within a longer text the value is put in as text.
`$${` is a literal `${`. Secrets stay as they are written (dsl/secrets.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from dsl.check import external_value, unknown_key
from dsl.convert import member_type, type_mistake, typed_value
from dsl.errors import did_you_mean, shortened
from dsl.launch import TABLE_NAMES
from dsl.op import chosen_tables
from dsl.order import cycles, in_order
from dsl.secrets import secret_names, texts
from dsl.toml import KeyPath
from dsl.tree import Tree, cells, owner_path, table_values

OPENING = "${"
TOKEN = re.compile(r"(?P<escape>\$\$\{)(?=(?P<ahead>[^{}]*\}?))|\$\{(?P<body>[^{}$]*)(?P<end>\}?)")
ENVIRONMENT = re.compile(r"env:(\w+)", re.ASCII)
FIELD = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)\.((?:[A-Za-z_]\w*\.)?[A-Za-z_]\w*)", re.ASCII)
TRACKING_URI = ("mlflow", "tracking_uri")
OF_PIPELINE = ("name", "seed")
KINDS = "${node.field}, ${env:NAME}, ${secret:NAME}, ${pipeline.name} or ${pipeline.seed}"


class _Refused(Exception):
    """A reference that cannot be resolved. hint: as in Finding. Without a message it is reported elsewhere."""

    def __init__(self, message: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def interpolate(tree: Tree) -> None:
    """Replace all references in a tree by their values; a wrong one becomes NOTHING and is reported to the tree."""
    _Interpolation(tree).run()


def referred_fields(value: Any) -> Iterator[str]:
    """The fields that the texts of a value refer to, known or not, as "node.field" or "node.table.field"."""
    for text in texts(value):
        for token in TOKEN.finditer(text):
            if not token["escape"] and FIELD.fullmatch(token["body"]):
                yield token["body"]


class _Interpolation:
    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.copies: dict[str, list[str]] = {}
        for node_id, copy in tree.copies.items():
            self.copies.setdefault(copy.template, []).append(node_id)
        self.refused: list[_Refused] = []  # of the value that is filled in at the moment
        self.waiting: dict[str, tuple[KeyPath, Any]] = {}  # by "node.field" or "node.table.field"
        for owner in (*TABLE_NAMES, *tree.nodes):
            whole = owner_path(owner)
            for name, value in cells(tree.table(*whole), tree.fields(owner)):
                path = (*whole, *name)
                if any(texts(value)) and (not tree.is_literal or tree.is_argument(path)):
                    self.waiting[".".join((owner, *name))] = path, value

    def run(self) -> None:
        while found := cycles(self._needed()):
            for cycle in found:
                self._report_cycle([cycle[0], *reversed(cycle[1:])])
        for cell in in_order(self._needed()):
            self._finish(*self.waiting[cell])

    def _needed(self) -> dict[str, list[str]]:
        """A mapping from each value with references to the values that must be filled in before it."""
        inside: dict[str, list[str]] = {}
        for cell in self.waiting:
            inside.setdefault(cell.rpartition(".")[0], []).append(cell)
        needed: dict[str, list[str]] = {cell: [] for cell in self.waiting}
        for cell, (_, value) in self.waiting.items():
            for owner, _, name in (field.partition(".") for field in referred_fields(value)):
                for field in (f"{each}.{name}" for each in self._ids(owner)):
                    near = (field, field.rpartition(".")[0], *inside.get(field, ()))
                    needed[cell] += [each for each in near if each in self.waiting]
        return needed

    def _ids(self, owner: str) -> list[str]:
        """The ids that a name stands for: itself, or the copies of a node that was expanded."""
        return [owner] if owner in TABLE_NAMES or owner in self.tree.nodes else self.copies.get(owner, [])

    def _report_cycle(self, cells: list[str]) -> None:
        fields = [
            (self.tree.template(owner), dot, name) for owner, dot, name in (each.partition(".") for each in cells)
        ]
        message = f"the values refer to each other: {' -> '.join(map(''.join, [*fields, fields[0]]))}"
        self.tree.report(self.waiting[cells[0]][0], message)
        for cell in cells:
            self._take_out(self.waiting.pop(cell)[0])

    def _finish(self, path: KeyPath, value: Any) -> None:
        self.refused = []
        field = self.tree.field(path)
        filled = self._filled(value, str if field is None else field.type, path)
        if not self.refused:
            self._holder(path)[str(path[-1])] = filled
            return
        self._take_out(path)
        wrong = dict.fromkeys((refused.message, refused.hint) for refused in self.refused if refused.message)
        for message, hint in wrong:
            self.tree.report(path, message, hint)

    def _take_out(self, path: KeyPath) -> None:
        self._holder(path)[str(path[-1])] = attrs.NOTHING

    def _holder(self, path: KeyPath) -> dict[str, Any]:
        return self.tree.table(*path[:-1])

    def _filled(self, value: Any, expected: Any, path: KeyPath) -> Any:
        if isinstance(value, str):
            return self._filled_text(value, expected, path) if OPENING in value else value
        if isinstance(value, dict):
            of_member = member_type(expected, dict)
            return {key: self._filled(member, of_member, path) for key, member in value.items()}
        if isinstance(value, (list, tuple)):
            of_member = member_type(expected, tuple)
            return type(value)(self._filled(member, of_member, path) for member in value)
        return value

    def _filled_text(self, text: str, expected: Any, path: KeyPath) -> Any:
        """The text with its references replaced. A refused reference is recorded, and stays as written."""
        whole = TOKEN.fullmatch(text)
        if whole is not None and not whole["escape"]:
            return self._or_refused(whole, lambda token: self._as_whole(token, expected, path))
        return TOKEN.sub(lambda token: str(self._or_refused(token, lambda token: self._as_text(token, path))), text)

    def _or_refused(self, token: re.Match[str], meaning: Callable[[re.Match[str]], Any]) -> Any:
        try:
            return meaning(token)
        except _Refused as refused:
            self.refused.append(refused)
            return token[0]

    def _as_whole(self, token: re.Match[str], expected: Any, path: KeyPath) -> Any:
        value = self._meaning(token, expected, path)
        variable = ENVIRONMENT.fullmatch(token["body"])
        if variable is None or secret_names(token[0]) or self.tree.field(path) is None:
            return value
        message = type_mistake(expected, value)
        if message is not None:
            takes_text = type_mistake(expected, os.environ[variable[1]]) is None
            hint = f"as a text it has quotes of its own: {variable[1]}='\"...\"'" if takes_text else ""
            raise _Refused(f"{token[0]}: {message}", hint)
        return value

    def _as_text(self, token: re.Match[str], path: KeyPath) -> str:
        if token["escape"]:  # what would be a secret keeps its second $ until the stage runs
            return token[0] if secret_names(OPENING + token["ahead"]) and _may_be_secret(path) else OPENING
        value = self._meaning(token, str, path)
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, (str, int, float)):
            return str(value)
        kind = "none" if value is None else {dict: "a table"}.get(type(value), "a list")
        raise _Refused(f"{self._as_written(token, path)} is {kind}, which cannot be part of a string")

    def _meaning(self, token: re.Match[str], expected: Any, path: KeyPath) -> Any:
        body = token["body"]
        if not token["end"]:
            raise _Refused(f'"{token[0]}" has no closing brace', "a literal ${ is written $${")
        if secret_names(token[0]):
            if not _may_be_secret(path):
                raise _Refused("secrets are allowed only in a node's values and in mlflow.tracking_uri")
            if path == TRACKING_URI:
                _from_environment(secret_names(token[0])[0], str)
            return token[0]
        environment = ENVIRONMENT.fullmatch(body)
        if environment is not None:
            return _from_environment(environment[1], expected)
        field = FIELD.fullmatch(body)
        if field is None:
            raise _Refused(f'"{token[0]}" is not one of {KINDS}', "a literal ${ is written $${")
        values = [self._value_of(owner, field[2], path) for owner in self._ids(field[1]) or [field[1]]]
        if any(value != values[0] for value in values):
            copies = ", ".join(self._ids(field[1]))
            raise _Refused(f"{token[0]} has a different value in each copy ({copies})", "name one of them")
        return values[0]

    def _as_written(self, token: re.Match[str], path: KeyPath) -> str:
        """The reference as written in the file; in a copied node, with the name of the node before it was copied."""
        field = FIELD.fullmatch(token["body"])
        in_copy = path[0] == "node" and field is not None
        return f"${{{self.tree.template(field[1])}.{field[2]}}}" if in_copy and field else token[0]

    def _value_of(self, owner: str, name: str, path: KeyPath) -> Any:
        tree = self.tree
        if owner in TABLE_NAMES and (owner != "pipeline" or name not in OF_PIPELINE):
            hint = did_you_mean(name, OF_PIPELINE) if owner == "pipeline" else ""
            raise _Refused(f"${{{owner}.{name}}} is not one of {KINDS}", hint)
        if owner not in TABLE_NAMES and owner not in tree.nodes:
            known = [*tree.templates(tree.nodes), *TABLE_NAMES]
            raise _Refused(f'there is no node "{owner}"', did_you_mean(owner, known))
        there = (*owner_path(owner), *name.split("."))
        field = tree.field(there)
        op = tree.op(owner)
        named = tree.template(owner)
        if field is None and op is None and path[2:] == ("op",):
            raise _Refused(f'an op cannot be read from node "{named}", whose own op is not known', "the ops: dflow ops")
        if field is None and op is None:
            raise _Refused  # reported at that op
        if field is None:
            if op is not None and name in op.edges:
                raise _Refused(f'node "{named}": "{name}" reads another node, it has no value')
            hint = unknown_key(tree, owner, name, fields_only=True).text
            raise _Refused(f'node "{named}" has no field "{shortened(name)}"', hint)
        table, _, key = name.rpartition(".")
        values = self._values_of(owner, table)
        value = attrs.NOTHING if values is None else values.get(key, field.made_default)
        if value is attrs.NOTHING:
            is_reported = key in (values or ()) or tree.table(*owner_path(owner)).get(table) is attrs.NOTHING
            if owner == "pipeline" or is_reported:
                raise _Refused
            raise _Refused(f'node "{named}" has no value for {name}')
        if type_mistake(field.type, value) is not None:
            raise _Refused  # reported at that field
        if name == "seed" and value is None:
            return self._value_of("pipeline", "seed", path)
        if not field.external or tree.folder(there) == tree.folder(path):
            return value
        return external_value(value, field, tree.folder(there))  # a path that stands in another folder's file

    def _values_of(self, owner: str, table: str) -> Mapping[str, Any] | None:
        """The values of a node or of one of its tables, the launch table included; None for a table that is not in use.

        A table that is not given has its default values, or an empty dict where another field chooses it.
        """
        values, fields = self.tree.table(*owner_path(owner)), self.tree.fields(owner)
        if not table:
            return values
        default = {} if table in chosen_tables(fields, values) else fields[table].made_default
        return table_values(default if values.get(table) is None else values[table])


def _may_be_secret(path: KeyPath) -> bool:
    return path[0] == "node" or path == TRACKING_URI


def _from_environment(name: str, expected: Any) -> Any:
    if name not in os.environ:
        hint = did_you_mean(name, list(os.environ)) or "export it before you call dflow"
        raise _Refused(f"the environment variable {name} is not set", hint)
    try:
        return typed_value(os.environ[name], expected)
    except ValueError:
        return os.environ[name]
