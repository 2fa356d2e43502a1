"""Plain values, as TOML, JSON and the command line have them, as typed ones and back: one strict cattrs converter.

Types are not coerced: 1 is not a bool, True not an int, "3" not a number. The exceptions: an int is accepted as a float
and becomes one, and lists become tuples. A table of an attrs class has all its required keys and no unknown ones.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import attrs
import tomli
from cattrs import ClassValidationError, Converter
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn

from dsl.errors import ConfigError, StructureError, did_you_mean, shortened
from dsl.finding import Field, Finding
from dsl.shown import shown_value
from dsl.toml import refused_values

T = TypeVar("T")
Hook = Callable[[Any, Any], Any]

OPENINGS = ('"', "'", "[", "{")

converter = Converter(unstruct_collection_overrides={tuple: list})


def structure(expected: type[T], value: object) -> T:
    """The value as one of a type: bool, int, float, str, None, Path, Any, Literal[...], X | Y, tuple[X, ...],
    dict[str, X], or an attrs class of such, also as an object.

    Raises StructureError with all mistakes in it, each with its path in the value.
    """
    return converter.structure(value, expected)


def unstructure(value: object) -> Any:
    """The value as JSON writes it: attrs classes as tables, tuples as lists, paths as texts."""
    return converter.unstructure(value)


def type_mistake(expected: Any, value: object) -> str | None:
    """Why the value is not of that type; None if it is."""
    try:
        structure(expected, value)
    except StructureError as error:
        return "; ".join(map(str, error.mistakes))
    return None


def type_name(expected: Any) -> str:
    """The type as a user of TOML would say it: `int`, `float`, `str`, `list of int`, `int or none`."""
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
    """A text of the command line or of an environment variable as TOML, or as it is where it is none: a bare word.

    `none` is None where the type has that. Raises ValueError for a text that begins as a quoted TOML string, a list or
    a table and is none.
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
    """Let a Literal also be given by older words for its values. words: old -> new."""

    def converted(value: Any, _: Any) -> Any:
        return _choice(words.get(value, value) if isinstance(value, str) else value, expected)

    converter.register_structure_hook_func(lambda each: each == expected, converted)


def member_type(expected: Any, container: type) -> Any:
    """What the members of a list (tuple) or table (dict) of this type are; str where it is neither."""
    for choice in _choices(expected):
        if typing.get_origin(choice) is container:
            return typing.get_args(choice)[0 if container is tuple else 1]
    return str


def table_class(expected: Any) -> Any:
    """The attrs class of a type that is one, or one or None; None for any other type."""
    classes = [choice for choice in _choices(expected) if choice is not type(None)]
    return classes[0] if len(classes) == 1 and attrs.has(classes[0]) else None


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table without tables in it: their values as "table.key". An empty one stays."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        inner = flat(value) if isinstance(value, dict) else {}
        found |= {f"{name}.{key}": each for key, each in inner.items()} or {name: value}
    return found


def readable(error: Exception) -> str:
    """What a validator says: `'lr' must be > 0: -1`, as attrs words it, -> `must be > 0, got -1`."""
    message = str(error.args[0]) if error.args else str(error)
    found = re.fullmatch(r"'\w+' must be (\S+) (\S+): (.*)", message, re.DOTALL)
    if found is not None:
        return f"must be {found[1]} {found[2]}, got {shortened(found[3])}"
    if re.fullmatch(r"Length of '\w+' must be >= 1: 0", message):
        return "must not be empty"
    return message


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
    """As the first type that leaves it as it is, else as the first one that takes it."""
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
    make: Hook = make_dict_structure_fn(
        cls, converter, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True
    )

    def made(value: Any, _: Any) -> Any:
        if type(value) is cls:  # attrs did not check its types
            value = attrs.asdict(value, recurse=False)  # type: ignore[arg-type]
        if not isinstance(value, dict):
            _refuse(cls, value)
        try:
            return make(value, cls)
        except ClassValidationError as error:
            raise StructureError(list(_mistakes(error, cls))) from None

    return made


def _mistakes(error: ClassValidationError, cls: type) -> Iterator[Finding]:
    of_fields, others = error.group_exceptions()
    for each, note in of_fields:
        if isinstance(each, StructureError):
            yield from each.below(note.name)
        elif isinstance(each, KeyError):
            yield Finding(f'the required key "{note.name}" is missing', advice=type_name(note.type))
        else:
            raise each
    for each in others:
        if isinstance(each, ForbiddenExtraKeysError):
            known = list(attrs.fields_dict(cls))
            for key in sorted(map(str, each.extra_fields)):
                hint = did_you_mean(key, known) or f"keys: {', '.join(known)}"
                yield Finding("unknown key", Field(key), hint)
        elif isinstance(each, (ConfigError, ValueError, TypeError)):
            named = re.match(r"(?:Length of )?'(\w+)' must ", str(each))  # as attrs' own validators say it
            yield Finding(readable(each), Field(named[1] if named else ""))
        else:
            raise each


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
