"""The canonical encoding of plain values, against a slow injective rendering."""

import math
from enum import Enum
from pathlib import Path

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from dsl.encoding import encode, fingerprint
from dsl.errors import ConfigError


class Colour(Enum):
    RED = 1
    BLUE = 2


@frozen
class Point:
    x: object
    y: object


@frozen
class Pair:
    x: object
    y: object


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf]),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from(["1", "1.0", "True", "None", ""]),
    st.binary(max_size=3),
    st.sampled_from(Colour),
)
values = st.recursive(
    plain,
    lambda members: st.one_of(
        st.lists(members, max_size=3),
        st.lists(members, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), members, max_size=3),
        st.builds(Point, members, members),
        st.builds(Pair, members, members),
    ),
    max_leaves=8,
)


def meaning(value: object) -> object:
    """A hashable that is equal exactly for values of the same meaning: slow, and obviously so."""
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else value.hex())
    if isinstance(value, (list, tuple)):
        return ("list", tuple(meaning(member) for member in value))
    if isinstance(value, dict):
        return ("dict", frozenset((key, meaning(member)) for key, member in value.items()))
    if isinstance(value, (Point, Pair)):
        return (type(value), meaning(value.x), meaning(value.y))
    return (type(value), value)


@given(values, values)
def test_two_values_have_the_same_encoding_exactly_when_they_mean_the_same(one: object, other: object) -> None:
    assert (encode(one) == encode(other)) == (meaning(one) == meaning(other))


@given(st.lists(values, max_size=4), st.lists(values, max_size=4))
def test_concatenated_encodings_can_be_told_apart(ones: list[object], others: list[object]) -> None:
    joined_alike = b"".join(map(encode, ones)) == b"".join(map(encode, others))
    assert joined_alike == (meaning(ones) == meaning(others))


@given(st.dictionaries(st.text(max_size=3), plain), st.randoms())
def test_the_order_of_a_dict_does_not_matter(table: dict[str, object], random: object) -> None:
    items = list(table.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    assert encode(dict(items)) == encode(table)


def test_values_that_look_alike_differ() -> None:
    alike = [1, 1.0, True, "1", b"1", None, "None", 0, 0.0, -0.0, False, "", b"", [], {}, [1], {"1": 1}, Colour.RED]
    assert len({encode(value) for value in alike}) == len(alike)


def test_a_list_equals_a_tuple_and_every_nan_is_the_same() -> None:
    assert encode([1, (2, 3)]) == encode((1, [2, 3]))
    assert encode(-math.nan) == encode(math.nan)


def test_the_encoding_of_a_fixed_value_never_changes() -> None:
    value = {
        "name": "dflow",
        "lr": 6e-4,
        "steps": 400,
        "ids": (1, -2),
        "seed": None,
        "on": [True, False],
        "raw": b"\x00",
    }
    expected = b"m7:s2:lrd?C\xa9*0U2as2:onl2:tfs3:idsl2:i1:1i2:-2s3:rawb1:\x00s4:names5:dflows4:seedns5:stepsi3:190"
    assert encode(value) == expected
    assert fingerprint(value) == "23c167bbda582e6ff444cc00e78a0d6598406ec00b4c2940873da5a747ab6469"


def test_a_path_cannot_enter_a_key() -> None:
    with pytest.raises(ConfigError) as caught:
        encode({"source": Path("data/a.jsonl")})
    expected = "data/a.jsonl: a path cannot enter a key, since its name says nothing about its content"
    assert str(caught.value) == expected


def test_a_value_without_an_encoding_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        encode([{1, 2}])
    assert str(caught.value) == "{1, 2}: a set cannot enter a key"
