"""What the copies of nodes differ in: the groups of `[for_each]`, `[sweep]` and `--sweep`. See dsl/for_each.py."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from dsl.convert import typed_value
from dsl.document import Document
from dsl.errors import shortened
from dsl.finding import Field, Finding, Position
from dsl.shown import toml_text
from dsl.toml import KeyPath

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
VALUE_LENGTH = 32
NEGATIVE = re.compile(r"-(?:[0-9]|inf)")
SORT = "sort"  # the key of [sweep] that sweeps nothing: the metric by which its table is sorted


@frozen
class Variant:
    """What one variant changes: node id -> the node's table as far as it is another one. place is where it stands.

    shown: what a user reads of it, such as the value of a sweep; in a group no two are alike.
    """

    name: str
    changes: Mapping[str, Mapping[str, Any]]
    place: KeyPath | Position
    shown: str


@frozen
class Group:
    """Variants of which every copy has one."""

    name: str
    variants: tuple[Variant, ...]

    @property
    def shown(self) -> str:
        """`draft` of `for_each.draft`, `train.lr` of `sweep.train.lr`."""
        return self.name.partition(".")[2]


@frozen
class Sweep:
    """`--sweep node.field=[...]` as it was given."""

    text: str

    @property
    def position(self) -> Position:
        return Position(f"--sweep {self.text}", is_argument=True)


def groups_of(document: Document | None, sweeps: Sequence[Sweep]) -> tuple[list[Group], list[Finding]]:
    """The groups of `[for_each]`, then those of `[sweep]`, whose values a sweep on the command line replaces."""
    mistakes: list[Finding] = []
    groups: list[Group] = []
    swept: dict[str, tuple[Any, KeyPath | Position]] = {}
    if document is not None:
        groups += _written_groups(document, mistakes)
        table = document.table("sweep")
        swept |= {".".join(path): (values, ("sweep", *path)) for path, values in _leaves(table) if path != (SORT,)}
    given: set[str] = set()
    for sweep in sweeps:
        path, equals, text = (part.strip() for part in sweep.text.partition("="))
        try:
            values = typed_value(text, None)
        except ValueError as error:
            mistakes.append(Finding(str(error), Field(position=sweep.position)))
            continue
        if not equals or path.count(".") < 1 or not all(path.split(".")):
            mistakes.append(Finding("expected node.field=[value, value]", Field(position=sweep.position)))
            continue
        if path in given:
            mistakes.append(
                Finding(f"{shortened(path)} is swept twice", Field(position=sweep.position), "give all values at once")
            )
            continue
        given.add(path)
        swept[path] = (values, sweep.position)
    for path, (values, place) in swept.items():
        groups += _swept_group(path, values, place, document, mistakes)
    return groups, mistakes


def sort_of(document: Document) -> tuple[str, list[Finding]]:
    """The metric that `[sweep] sort` names; empty where it names none."""
    named = document.table("sweep").get(SORT, "")
    if isinstance(named, str):
        return named, []
    if isinstance(named, dict):  # a node of that name
        return "", []
    message = "expected the name of a metric"
    return "", [mistake_at(document, ("sweep", SORT), message, 'sort = "eval/tau", "-train/loss" for the least first')]


def _written_groups(document: Document, mistakes: list[Finding]) -> Iterator[Group]:
    for name, variants in document.table("for_each").items():
        place = ("for_each", name)
        if not isinstance(variants, dict) or not variants:
            hint = f"[for_each.{shortened(name)}.<variant>] with node.field = value"
            mistakes.append(mistake_at(document, place, "a group has one table for each variant", hint))
            continue
        found = []
        for variant, changes in variants.items():
            here = (*place, variant)
            wrong = _wrong_variant(variant, changes)
            if wrong:
                mistakes.append(mistake_at(document, here, wrong, "train.num_layers = 2"))
                continue
            found.append(Variant(variant, changes, here, variant))
        if found and not any(variant.changes for variant in found):
            mistakes.append(mistake_at(document, place, "no variant of this group changes a value"))
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
    path: str, values: Any, place: KeyPath | Position, document: Document | None, mistakes: list[Finding]
) -> Iterator[Group]:
    node_id, _, field = path.partition(".")
    if not field:
        mistakes.append(mistake_at(document, place, "expected node.field = [value, value]"))
    elif not isinstance(values, (list, tuple)) or not values:
        mistakes.append(mistake_at(document, place, "expected a list of values, one for each copy", "[1e-3, 3e-4]"))
    elif field == "launch" and not all(isinstance(value, dict) for value in values):
        message = "expected a list of tables, one for each copy"
        mistakes.append(mistake_at(document, place, message, "[{ threads = 1 }, { threads = 2 }]"))
    elif len(set(map(toml_text, values))) < len(values):
        mistakes.append(mistake_at(document, place, "a value is given twice"))
    else:
        names = _value_names(field, values)
        variants = [
            Variant(name, {node_id: _nested(field.split("."), value)}, place, toml_text(value))
            for name, value in zip(names, values, strict=True)
        ]
        yield Group(f"sweep.{path}", tuple(variants))


def _value_names(field: str, values: Iterable[Any]) -> list[str]:
    """`lr_0_001`, `x_m1_0` for -1.0: the field and the value, in the characters of ids, each name once."""
    names: list[str] = []
    for number, value in enumerate(values, start=1):
        shown = re.sub(r"[^A-Za-z0-9-]+", "_", toml_text(value)).strip("_")
        shown = f"{'m' if NEGATIVE.match(shown) else ''}{shown.strip('_-')}"[:VALUE_LENGTH]
        name = f"{field.rpartition('.')[2]}_{shown or number}"
        while name in names:
            name = f"{name}_{number}"
        names.append(name)
    return names


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


def mistake_at(document: Document | None, place: KeyPath | Position, message: str, hint: str = "") -> Finding:
    if isinstance(place, Position):
        return Finding(message, Field(position=place), hint)
    position = document.position(place) if document is not None else None
    return Finding(message, Field(".".join(map(str, place)), position), hint)
