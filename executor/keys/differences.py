"""What differs between two nodes: one model for the plan's reasons, `dflow plan --why`, `dflow diff` and the report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import attrs
from attrs import frozen

from dsl.convert import unstructure
from executor.keys.node_key import KeyParts
from executor.system.output import shown_digest

Kind = Literal["op", "config", "content", "code", "code rule", "library", "setting", "value"]
CODE: Final = frozenset({"code", "code rule"})

ABSENT: Final = object()
REASONS_SHOWN = 3
EARLIER_RULE = "recorded by an earlier dflow"
OTHER_RULE = f"code rule changed: {EARLIER_RULE}"  # the reason of a node without another difference


@frozen
class FileContent:
    """The content of a file or folder that a field names, in place of the field's value. path: "" where unknown."""

    digest: str
    path: str = ""

    def __str__(self) -> str:
        return f"file {Path(self.path).name or shown_digest(self.digest)}"


@frozen
class Difference:
    """A named value that differs between two nodes; ABSENT where one of them lacks it.

    kind: "op", "config", "content", "code" and "library" enter the key; a "setting" does not. "code rule": only one
    node has its code digests by file, so code is not compared. "value": the key parts are gone, so it may be a setting
    or a config value.
    name: a field; for code the source file, for a library its distribution.
    path: the file or folder whose content differs, if known; "OLD, now NEW" if it is another one.
    old, new: digests for code; for "config" a FileContent where only one node's field named a file.
    given: the user's value, where a trial run uses `new` in its place.
    """

    kind: Kind
    name: str
    old: Any
    new: Any
    path: str = ""
    given: Any = ABSENT

    def __str__(self) -> str:
        """The change in words: `from 1 to 2`, `set to 2`, `no longer there, was 1`, `from 1 to 4 (given: 2)`."""
        given = "" if self.given is ABSENT else f" (given: {self.shown(self.given)})"
        return f"{self._change()}{given}"

    def _change(self) -> str:
        if self.old is ABSENT:
            return f"set to {self.shown(self.new)}"
        if self.new is ABSENT:
            return f"no longer there, was {self.shown(self.old)}"
        return f"from {self.shown(self.old)} to {self.shown(self.new)}"

    def shown(self, value: Any) -> str:
        """One side of the difference as text: a digest shortened, any other value as JSON."""
        if isinstance(value, FileContent):
            return str(value)
        is_digest = self.kind in ("content", "code")
        return shown_digest(str(value)) if is_digest else json.dumps(value, ensure_ascii=False, default=str)

    def label(self, node: str) -> str:
        """The name to show: `node.field`, or for libraries and ops just their name."""
        return self.name if self.kind in ("library", "op") else f"{node}.{self.name}"

    def to_json(self) -> dict[str, Any]:
        named = {"old": self.old, "new": self.new}
        values = {name: unstructure(each) if isinstance(each, FileContent) else each for name, each in named.items()}
        head = {"kind": self.kind, "name": self.name} | ({"path": self.path} if self.path else {})
        return head | {name: value for name, value in values.items() if value is not ABSENT}


def differences(old: KeyParts, new: KeyParts) -> list[Difference]:
    """All differences between two nodes' key parts."""
    found = value_differences("op", {"op": old.op, "version": old.version}, {"op": new.op, "version": new.version})
    old_files, new_files = _files_for_values(old, new), _files_for_values(new, old)
    values = value_differences("config", {**old.config, **old_files}, {**new.config, **new_files})
    found += [each for each in values if not _is_of_paths(each)]
    replaced = {*old_files, *new_files}
    content = ({name: each.external[name] for name in each.external if name not in replaced} for each in (old, new))
    found += value_differences("content", *content)
    found += code_differences(old.code, new.code, is_chosen_anew=bool(values))
    return found + value_differences("library", old.libraries, new.libraries)


def code_differences(
    old: Mapping[str, str], new: Mapping[str, str], *, is_chosen_anew: bool = False
) -> list[Difference]:
    """The source files whose code differs.

    is_chosen_anew: other config values may have chosen other code, so only files on both sides are compared.
    """
    if is_of_earlier_rule(old) != is_of_earlier_rule(new):
        return [Difference("code rule", EARLIER_RULE, "", "")]
    found = value_differences("code", old, new)
    return [each for each in found if not is_chosen_anew or ABSENT not in (each.old, each.new)]


def is_of_earlier_rule(code: Mapping[str, str]) -> bool:
    """Whether code digests have the older form "module:symbol" of an earlier dflow."""
    return any(":" in place for place in code)


def with_given(found: Iterable[Difference], taken: Mapping[str, Any], given: Mapping[str, Any]) -> list[Difference]:
    """The differences, with the user's value added where a trial run uses another one. taken, given: configs."""
    changed = {name: value for name, value in given.items() if value is not None and value != taken[name]}
    return [
        attrs.evolve(each, given=changed[each.name]) if each.kind == "config" and each.name in changed else each
        for each in found
    ]


def _files_for_values(parts: KeyParts, other: KeyParts) -> dict[str, FileContent]:
    """The content of fields that name a file in `parts`, but hold a plain value in `other`."""
    given = {name for name, value in other.config.items() if not _are_paths(value)}
    names = [name for name in parts.external if name in given and name not in parts.config]
    return {name: FileContent(parts.external[name]) for name in names}


def with_paths(
    found: Iterable[Difference], new: Mapping[str, Any], old: Mapping[str, Any] | None = None
) -> list[Difference]:
    """The differences, with the paths that the configs name. old: None where unknown."""
    return [_with_paths(each, new, old or {}) for each in found]


def _with_paths(difference: Difference, new: Mapping[str, Any], old: Mapping[str, Any]) -> Difference:
    name = difference.name
    if difference.kind == "content":
        named = (_path(config, name) for config in (old, new))
        return attrs.evolve(difference, path=", now ".join(dict.fromkeys(path for path in named if path)))
    if name in new and isinstance(difference.new, FileContent):
        return attrs.evolve(difference, new=attrs.evolve(difference.new, path=str(new[name])))
    if name in old and isinstance(difference.old, FileContent):
        return attrs.evolve(difference, old=attrs.evolve(difference.old, path=str(old[name])))
    return difference


def _path(config: Mapping[str, Any], name: str) -> str:
    """The path in a field or in a list member such as `source[2]`; empty where there is none."""
    field, _, place = name.removesuffix("]").partition("[")
    value = config.get(field)
    if place:
        value = value[int(place)] if isinstance(value, (list, tuple)) and int(place) < len(value) else None
    return value if isinstance(value, str) else ""


def _is_of_paths(difference: Difference) -> bool:
    """Whether both sides are lists of paths. Keys hold only their length, so the contents show any difference."""
    sides = [value for value in (difference.old, difference.new) if value is not ABSENT]
    return any(sides) and all(map(_are_paths, sides))


def _are_paths(value: Any) -> bool:
    """Whether a key's value is a list of paths, whose members are null."""
    return isinstance(value, (list, tuple)) and all(member is None for member in value)


def value_differences(kind: Kind, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """The differences between two mappings, sorted by name; for nested tables by "table.key"."""
    found: list[Difference] = []
    for name in sorted({*old, *new}):
        sides = (old.get(name, ABSENT), new.get(name, ABSENT))
        if not is_different(*sides):
            continue
        tables = [side if isinstance(side, dict) else {} for side in sides]
        if any(tables) and all(isinstance(side, dict) or side in (None, ABSENT) for side in sides):
            inside = value_differences(kind, *tables)
            found += [attrs.evolve(each, name=f"{name}.{each.name}") for each in inside]
        else:
            found.append(Difference(kind, name, *sides))
    return found


def is_different(old: Any, new: Any) -> bool:
    """Whether keys tell two values apart, by their JSON: 1, 1.0, -0.0 and True differ, nan is nan."""
    if old is ABSENT or new is ABSENT:
        return old is not new
    return json.dumps(old, sort_keys=True, default=str) != json.dumps(new, sort_keys=True, default=str)


def distance(found: Sequence[Difference]) -> int:
    """The number of values that differ; all code together counts as one."""
    values = sum(difference.kind != "code" for difference in found)
    return values + (len(found) > values)


def difference_text(node: str, difference: Difference) -> str:
    """The difference in one line: kind, name and both values; for code only the file, and which node has it."""
    if difference.kind in CODE:
        return f"{difference.kind} changed: {code_text(difference)}"
    place = f" ({difference.path})" if difference.path else ""
    return f"{difference.kind} changed: {difference.label(node)}{place} {difference}"


def reasons(node: str, found: Iterable[Difference]) -> list[str]:
    """The differences as one line for each kind, for a table: the first values, and the places of changed code."""
    by_kind: dict[Kind, list[Difference]] = {}
    for difference in found:
        by_kind.setdefault(difference.kind, []).append(difference)
    return [f"{kind} changed: {_listed(node, kind, members)}" for kind, members in by_kind.items()]


def _listed(node: str, kind: Kind, found: Sequence[Difference]) -> str:
    shown = [_reason(node, each) for each in found[:REASONS_SHOWN]]
    rest = len(found) - REASONS_SHOWN
    return ", ".join(shown) + (f", and {rest} more" if rest > 0 else "")


def _reason(node: str, difference: Difference) -> str:
    if difference.kind in CODE:
        return code_text(difference)
    return difference.label(node) + ("" if difference.kind == "content" else f" {difference}")


def code_text(difference: Difference) -> str:
    """A changed source file for a list of files: its name, and whether it is imported only now or no longer."""
    if difference.old is ABSENT:
        return f"{difference.name} (imported now)"
    return f"{difference.name} (no longer imported)" if difference.new is ABSENT else difference.name
