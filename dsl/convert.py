"""Plain values, as TOML, JSON and the command line have them, as typed ones and back: one strict cattrs converter.

Types are not coerced: 1 is not a bool, True not an int, "3" not a number. The exceptions: an int is accepted as a float
and becomes one, and lists become tuples. A table of an attrs class has all its required keys and no unknown ones.

Rules between the fields of a class, which the JSON schema reads too, are validators of one of the fields. They raise
ValueError with a message, in which {name} is that field's. A field that is itself wrong is asked nothing.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import attrs
import tomli
from attrs import define, frozen, validators
from cattrs import Converter

from dsl.errors import ConfigError, StructureError, did_you_mean, shortened
from dsl.finding import Field, Finding
from dsl.shown import shown_value
from dsl.toml import refused_values

EMPTY = (None, ())
ALL_OF: Any = type(validators.and_())  # attrs names the classes of its validators nowhere
OPTIONAL: Any = type(validators.optional(validators.ge(0)))
BOUND: Any = type(validators.ge(0))


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


T = TypeVar("T")
Hook = Callable[[Any, Any], Any]

OPENINGS = ('"', "'", "[", "{")
UNKNOWN = "unknown key"  # the code of such a mistake
REFUSALS = (ConfigError, StructureError, ArithmeticError, TypeError, ValueError)  # of validators and constructors


@frozen
class KeyHint:
    """A hint for an unknown key. key: the key of the same table that was meant, "" for none."""

    text: str
    key: str = ""


converter = Converter(unstruct_collection_overrides={tuple: list})


def structure(expected: type[T], value: object) -> T:
    """Convert plain values to a type, and check them.

    The type: bool, int, float, str, None, Path, Any, Literal[...], X | Y, tuple[X, ...], dict[str, X], or an attrs
    class of these; an object of the class is taken too. Raises StructureError with all mistakes, each with its path in
    the value.
    """
    return converter.structure(value, expected)


def unstructure(value: object) -> Any:
    """The value as JSON writes it: attrs classes as tables, tuples as lists, paths as texts."""
    return converter.unstructure(value)


def type_mistake(expected: Any, value: object) -> str | None:
    """A text on why a value is not of a type; None if it is."""
    try:
        structure(expected, value)
    except StructureError as error:
        return "; ".join(map(str, error.mistakes))
    return None


def bound_mistake(validator: Any, field: Any, value: Any) -> str:
    """A text on why a number is beyond the bounds in a field's validator; empty if it is not. field: has its name."""
    for rule in validators_of(validator):
        try:
            if isinstance(rule, BOUND) and isinstance(value, (int, float)):
                rule(None, field, value)
        except ValueError as error:
            return readable(error)
    return ""


def type_name(expected: Any) -> str:
    """The type's name as a user of TOML knows it, such as `int`, `list of int` or `int or none`."""
    arguments = typing.get_args(expected)
    if _is_union(expected):
        return " or ".join(type_name(member) for member in arguments)
    if _is_literal(expected):
        return "one of " + ", ".join(shown_value(choice) for choice in arguments)
    if _is_tuple(expected):
        return f"list of {type_name(arguments[0])}"
    if _is_mapping(expected):
        return "table" if arguments[1] is Any else f"table of {type_name(arguments[1])}"
    if expected is None or expected is type(None):
        return "none"
    if expected is Path:
        return "path"
    return "table" if attrs.has(expected) else getattr(expected, "__name__", str(expected))


def typed_value(text: str, expected: Any) -> Any:
    """Parse a text of the command line or of an environment variable as a TOML value; a bare word stays a string.

    `none` gives None where the type allows it. Raises ValueError for a text that opens a quoted string, a list or a
    table but is not valid TOML.
    """
    if text == "none" and type_mistake(expected, None) is None:
        return None
    try:
        document = tomli.loads(f"value = {text}")
    except ValueError as error:
        if text.startswith(OPENINGS):
            reason = getattr(error, "msg", str(error))
            raise ValueError(f"not TOML: {reason}; text in a list needs quotes, as in TOML") from error
        return text
    if len(document) > 1:
        return text
    for _path, message in refused_values(document):
        raise ValueError(message)
    return document["value"]


def accept_old_words(expected: Any, words: Mapping[str, str]) -> None:
    """Let a Literal type also accept older spellings of its values. words: old -> new."""

    def converted(value: Any, _: Any) -> Any:
        return _choice(words.get(value, value) if isinstance(value, str) else value, expected)

    converter.register_structure_hook_func(lambda each: each == expected, converted)


def member_type(expected: Any, container: type) -> Any:
    """The type of the members of a list (tuple) or table (dict) type; str for any other type."""
    for choice in _choices(expected):
        if typing.get_origin(choice) is container:
            return typing.get_args(choice)[0 if container is tuple else 1]
    return str


def table_class(expected: Any) -> Any:
    """The attrs class of a type X or X | None; None for any other type."""
    classes = [choice for choice in _choices(expected) if choice is not type(None)]
    return classes[0] if len(classes) == 1 and attrs.has(classes[0]) else None


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table without nested tables; their values appear as "table.key". An empty nested table stays."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        inner = flat(value) if isinstance(value, dict) else {}
        found |= {f"{name}.{key}": each for key, each in inner.items()} or {name: value}
    return found


def readable(error: Exception) -> str:
    """A validator's message in plain words: `'lr' must be > 0: -1` becomes `must be > 0, got -1`."""
    message = str(error.args[0]) if error.args else str(error)
    found = re.fullmatch(r"'\w+' must be (\S+) (\S+): (.*)", message, re.DOTALL)
    if found is not None:
        return f"must be {found[1]} {found[2]}, got {shortened(found[3])}"
    if re.fullmatch(r"Length of '\w+' must be >= 1: 0", message):
        return "must not be empty"
    return message


@frozen
class Member:
    """A field of an attrs class that a TOML table describes. table: the class of a nested table, if the field holds
    one.
    """

    name: str
    type: Any
    table: type | None

    @property
    def wanted(self) -> str:
        """The name of the field's type, for the message about a table that lacks the field."""
        return type_name(self.type)

    def structure(self, value: object) -> Any:
        """The value converted to the field's type. Raises StructureError."""
        return structure(self.type, value)


@define
class Checked:
    """The result of checking a table against a class: the object, or all mistakes.

    values: the valid values, converted to their fields' types. wrong: the names of keys with invalid values. mistakes:
    each with the path of its key in the table, "" where only the table as a whole is wrong. clashes: path of a refused
    value -> the names of the given values that exclude it.
    """

    made: Any = None
    values: dict[str, Any] = attrs.Factory(dict)
    wrong: set[str] = attrs.Factory(set)
    mistakes: list[Finding] = attrs.Factory(list)
    clashes: dict[str, list[str]] = attrs.Factory(dict)


def checked(
    cls: type, given: Mapping[str, Any], members: Mapping[str, Any] | None = None, owner: str = "", into: Any = None
) -> Checked:
    """Check a table of plain values against a class, and make the object.

    Making the object validates it once; only if that fails do validators run one by one, to find all mistakes. A value
    NOTHING has a mistake that is reported already. members: how to check each field, where the class's annotations do
    not say. owner: the op or table, to find names of other projects (dsl/aliases.py). into: an uninitialised object of
    the class to fill.
    """
    members = members_of(cls) if members is None else members
    found = Checked()
    meant = {_check_member(found, members, name, value, owner) for name, value in given.items()}
    required = [each.name for each in attrs.fields(cls) if each.init and each.default is attrs.NOTHING]
    lacking = [name for name in required if name not in given and name not in meant]
    whole = None
    if not found.mistakes and not found.wrong and not lacking:
        made = object.__new__(cls) if into is None else into
        try:
            getattr(made, "__attrs_init__", made.__init__)(**found.values)
        except REFUSALS as error:
            whole = error
        else:
            found.made = made
            return found
    for name, refusal in _refused(cls, given, found).items():
        found.mistakes.append(Finding(readable(refusal), Field(name)))
        if isinstance(refusal, Clash):
            found.clashes[name] = [each for each in refusal.others if each in given]
        found.values.pop(name, None)
        found.wrong.add(name)
    for name in lacking:
        found.mistakes.append(Finding(f'the required key "{name}" is missing', advice=members[name].wanted))
    if whole is not None and not found.mistakes:
        named = re.match(r"(?:Length of )?'(\w+)' must ", str(whole))  # as attrs' own validators say it
        found.mistakes.append(Finding(readable(whole), Field(named[1] if named else "")))
    return found


@cache
def members_of(cls: type) -> Mapping[str, Member]:
    """The fields of a class by name, with the types of their annotations."""
    hints = typing.get_type_hints(cls)
    types = {each.name: hints[each.name] for each in attrs.fields(cls) if each.init}
    return {name: Member(name, expected, table_class(expected)) for name, expected in types.items()}


def _check_member(found: Checked, members: Mapping[str, Any], name: str, value: Any, owner: str) -> str:
    """Check one value, and add it or its mistake to `found`. Returns the key that an unknown one stands for."""
    member = members.get(name)
    if member is None:
        keys = [key for each in members.values() for key in (each.name, *_keys_inside(each))]
        hint = KeyHint(did_you_mean(name, keys) or f"keys: {', '.join(keys)}")
        if owner:
            from dsl.aliases import key_hint  # only for mistakes

            hint = key_hint(name, owner, keys, {})
        found.mistakes.append(Finding("unknown key", Field(name), hint.text, code=UNKNOWN))
        return hint.key
    if value is attrs.NOTHING:
        found.wrong.add(name)
        return ""
    if member.table is not None and isinstance(value, (dict, member.table)):
        inner = value if isinstance(value, dict) else attrs.asdict(value, recurse=False)
        inside = checked(member.table, inner, owner=f"{owner}.{name}" if owner else "")
        found.mistakes += StructureError(inside.mistakes).below(name)
        for key, others in inside.clashes.items():
            found.clashes[f"{name}.{key}"] = [f"{name}.{each}" for each in others]
        if inside.made is None:
            found.wrong.add(name)
        else:
            found.values[name] = inside.made
        return ""
    try:
        found.values[name] = member.structure(value)
    except StructureError as error:
        in_one = Finding("; ".join(map(str, error.mistakes)), Field(name))
        found.mistakes += [in_one] if owner else error.below(name)
        found.wrong.add(name)
    return ""


def _keys_inside(member: Any) -> list[str]:
    return [] if member.table is None else [f"{member.name}.{key}" for key in members_of(member.table)]


def _refused(cls: type, given: Mapping[str, Any], found: Checked) -> dict[str, Exception]:
    """The exception of each field whose validator refuses its value.

    A validator sees the other fields as far as they are valid; a field with an invalid value has no default either. For
    an invalid table only the rule that chooses it is checked.
    """
    attributes = [each for each in attrs.fields(cls) if each.init]
    stand_in: Any = object.__new__(cls)
    for each in attributes:
        value = found.values.get(each.name, each.default)
        is_known = value is not attrs.NOTHING and each.name not in found.wrong
        if is_known and not isinstance(value, attrs.Factory):  # type: ignore[arg-type]
            object.__setattr__(stand_in, each.name, value)
    refused: dict[str, Exception] = {}
    for each in attributes:
        rules = [each.validator]
        if each.name in found.wrong:
            of_table = validators_of(each.validator) if isinstance(given.get(each.name), dict) else ()
            rules = [rule for rule in of_table if isinstance(rule, ChosenBy)]
        for validate in filter(None, rules if each.name in given else ()):
            try:
                validate(stand_in, each, found.values.get(each.name, given[each.name]))
            except AttributeError:
                continue  # it asks for a field that is itself wrong or missing
            except REFUSALS as error:
                refused[each.name] = error
    return refused


def _choices(expected: Any) -> tuple[Any, ...]:
    return typing.get_args(expected) if _is_union(expected) else (expected,)


def _is_union(expected: Any) -> bool:
    return typing.get_origin(expected) in (typing.Union, types.UnionType)


def _is_literal(expected: Any) -> bool:
    return typing.get_origin(expected) is typing.Literal


def _is_tuple(expected: Any) -> bool:
    return typing.get_origin(expected) is tuple


def _is_mapping(expected: Any) -> bool:
    return typing.get_origin(expected) in (dict, Mapping)


def _refuse(expected: Any, value: object) -> NoReturn:
    raise StructureError([Finding(f"expected {type_name(expected)}, got {shown_value(value)}")])


def _instance(value: Any, expected: Any) -> Any:
    if type(value) is expected or (isinstance(value, expected) and not isinstance(value, bool)):
        return value
    _refuse(expected, value)


def _float(value: Any, expected: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        _refuse(expected, value)
    try:
        return float(value)
    except OverflowError:
        _refuse(expected, value)


def _none(value: Any, expected: Any) -> None:
    if value is not None:
        _refuse(expected, value)


def _path(value: Any, expected: Any) -> Path:
    if not isinstance(value, (str, Path)):
        _refuse(expected, value)
    return Path(value)


def _choice(value: Any, expected: Any) -> Any:
    if not any(value == choice and type(value) is type(choice) for choice in typing.get_args(expected)):
        _refuse(expected, value)
    return value


def _one_of(value: Any, expected: Any) -> Any:
    """Convert a value to the first type of a union that leaves it unchanged, else to the first that accepts it."""
    cls = table_class(expected)
    if cls is not None and isinstance(value, (dict, cls)):
        return structure(cls, value)  # whose mistakes say more
    ways = []
    for member in typing.get_args(expected):
        try:
            ways.append(structure(member, value))
        except StructureError:
            continue
    if not ways:
        _refuse(expected, value)
    written = repr(unstructure(value)) if len(ways) > 1 else ""
    return next((way for way in ways if repr(unstructure(way)) == written), ways[0])


def _list(value: Any, expected: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        _refuse(expected, value)
    of_member = typing.get_args(expected)[0]
    return tuple(_members(((f"member {place}", member) for place, member in enumerate(value, start=1)), of_member))


def _table(value: Any, expected: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(type(key) is str for key in value):
        _refuse(expected, value)
    return dict(zip(value, _members(value.items(), typing.get_args(expected)[1]), strict=True))


def _members(named: Iterable[tuple[str, Any]], expected: Any) -> list[Any]:
    hook = converter.get_structure_hook(expected)
    made, mistakes = [], []
    for name, value in named:
        try:
            made.append(hook(value, expected))
        except StructureError as error:
            mistakes += error.below(name)
    if mistakes:
        raise StructureError(mistakes)
    return made


def _object(cls: type) -> Hook:
    def made(value: Any, _: Any) -> Any:
        if type(value) is cls:  # attrs did not check its types
            value = attrs.asdict(value, recurse=False)  # type: ignore[arg-type]
        if not isinstance(value, dict):
            _refuse(cls, value)
        found = checked(cls, value)
        if found.mistakes:
            raise StructureError(found.mistakes)
        return found.made

    return made


converter.register_structure_hook_func(lambda expected: isinstance(expected, type) and expected is not Any, _instance)
for scalar in (bool, int, str, bytes):
    converter.register_structure_hook(scalar, _instance)
converter.register_structure_hook(float, _float)
converter.register_structure_hook(type(None), _none)
converter.register_structure_hook(Path, _path)
converter.register_structure_hook_func(_is_literal, _choice)
converter.register_structure_hook_func(_is_union, _one_of)
converter.register_structure_hook_func(_is_tuple, _list)
converter.register_structure_hook_func(_is_mapping, _table)
converter.register_structure_hook_factory(attrs.has, _object)
converter.register_unstructure_hook_func(lambda cls: isinstance(cls, type) and issubclass(cls, Path), str)
