"""Rules between the fields of a node, which both the check of its values and the JSON schema read.

Each is a validator of one of the fields, and raises ValueError with its message, in which {name} is that field's. Of a
field that is itself wrong, and so is not there, nothing is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from attrs import validators

EMPTY = (None, ())
ALL_OF: Any = type(validators.and_())  # attrs names the classes of its validators nowhere
OPTIONAL: Any = type(validators.optional(validators.ge(0)))


class Clash(ValueError):
    """A value that excludes values given for other fields. others: their names."""

    def __init__(self, message: str, others: Sequence[str]) -> None:
        super().__init__(message)
        self.others = tuple(others)


class Needs:
    """A validator: with this value, the fields in `given` must be set, and those in `left_out` must be None."""

    def __init__(self, value: Any, message: str, given: Sequence[str] = (), left_out: Sequence[str] = ()) -> None:
        self.value = value
        self.message = message
        self.given = given
        self.left_out = left_out

    def __call__(self, instance: Any, _attribute: object, value: object) -> None:
        if value != self.value:
            return
        if any(getattr(instance, name) is None for name in self.given):
            raise ValueError(self.message)
        if others := [name for name in self.left_out if getattr(instance, name) is not None]:
            raise Clash(self.message, others)


class Only:
    """A validator: only if the field `other` has this value may the validated field differ from its default."""

    def __init__(self, other: str, value: Any, message: str) -> None:
        self.other = other
        self.value = value
        self.message = message

    def __call__(self, instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
        if value != attribute.default and getattr(instance, self.other, self.value) != self.value:
            raise Clash(self.message.format(name=attribute.name), [self.other])


class ChosenBy(Only):
    """A validator of a table that belongs to one value of the field `other`; if left out then, it has its defaults."""


class Given:
    """A validator of a field: another value than the field's default puts requirements on other fields.

    The fields in `given` must then be neither None nor empty. Those in `left_out` must have the values stated there.
    """

    def __init__(self, message: str, given: Sequence[str] = (), left_out: Mapping[str, Any] | None = None) -> None:
        self.message = message
        self.given = given
        self.left_out = left_out or {}

    def __call__(self, instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
        if value == attribute.default:
            return
        message = self.message.format(name=attribute.name)
        if any(getattr(instance, name) in EMPTY for name in self.given):
            raise ValueError(message)
        if others := [name for name, wanted in self.left_out.items() if getattr(instance, name) != wanted]:
            raise Clash(message, others)


def validators_of(validator: Any) -> Iterator[Any]:
    """Every single validator inside a validator, including those in lists, in `and_` and in `optional`."""
    if isinstance(validator, (list, tuple)):
        for each in validator:
            yield from validators_of(each)
    elif isinstance(validator, ALL_OF):
        yield from validators_of(validator._validators)
    elif isinstance(validator, OPTIONAL):
        yield from validators_of(validator.validator)
    else:
        yield validator
