"""The strict converter: which plain values are of a type, what becomes of them, and all that is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
from attrs import frozen, validators

from dsl.convert import structure, unstructure
from dsl.errors import StructureError


@frozen
class Entry:
    """A file."""

    size: int = attrs.field(validator=validators.ge(0))
    kind: Literal["text", "image"] = "text"


@frozen
class Listing:
    """Files in folders."""

    files: Mapping[str, Entry]
    folders: tuple[Path, ...] = ()
    weight: float | None = None


def mistakes(expected: Any, value: object) -> list[str]:
    with pytest.raises(StructureError) as caught:
        structure(expected, value)
    return str(caught.value).split("\n")


@pytest.mark.parametrize(
    ("expected", "value"), [(int, True), (int, "3"), (int, 3.0), (bool, 1), (float, "1.5"), (float, True), (str, 3)]
)
def test_no_scalar_is_taken_for_one_of_another_type(expected: type, value: object) -> None:
    assert f"expected {expected.__name__}, got " in mistakes(expected, value)[0]


def test_an_int_becomes_a_float_only_where_no_int_is_asked_for() -> None:
    assert "1.0" == repr(structure(float, 1))
    assert "1" == repr(structure(float | int, 1))  # type: ignore[arg-type]
    assert "(1.0, 2.5)" == repr(structure(tuple[float, ...], [1, 2.5]))


def test_an_object_is_equal_when_it_is_read_again() -> None:
    listing = Listing({"a": Entry(3), "b": Entry(0, "image")}, (Path("x"), Path("/y")), 0.5)
    assert listing == structure(Listing, json.loads(json.dumps(unstructure(listing))))


def test_all_mistakes_are_found_at_once_each_with_its_path() -> None:
    value = {
        "files": {"a": {"size": "3"}, "b": {"kind": "text"}, "c": {"size": -1}, "d": {"size": 1, "kin": 2}, "e": 5},
        "folders": ["x", 1, 2],
        "more": 1,
    }
    assert [
        'files.a.size: expected int, got "3"',
        'files.b: the required key "size" is missing (int)',
        "files.c.size: must be >= 0, got -1",
        'files.d.kin: unknown key (did you mean "kind"?)',
        "files.e: expected table, got 5 (int)",
        "folders.member 2: expected path, got 1 (int)",
        "folders.member 3: expected path, got 2 (int)",
        "more: unknown key (keys: files, folders, weight)",
    ] == mistakes(Listing, value)
