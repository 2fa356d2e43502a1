"""What became of a node's code between two keys: changed, new, gone or moved definitions, with their diffs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from attrs import frozen

from executor.system.output import counted

Kind = Literal["changed", "added", "removed", "moved", "renamed"]
Texts = Callable[[str, str], str | None]  # (place, hash) -> source text, None where it was not kept

SINGLY_SHOWN = 3
DIFF_LINES = 400
WORDS = {"changed": "changed", "added": "now used", "removed": "no longer used", "moved": "moved", "renamed": "renamed"}


@frozen
class CodeChange:
    """One definition "module:symbol"; `before` is its earlier place where it was moved or renamed.

    diff: unified, without an end of line; empty where there is none, None where the old text was not kept.
    """

    kind: Kind
    place: str
    before: str = ""
    diff: tuple[str, ...] | None = ()

    @property
    def module(self) -> str:
        return self.place.partition(":")[0]

    @property
    def name(self) -> str:
        return self.place.partition(":")[2]

    def to_json(self) -> dict[str, Any]:
        diff = None if self.diff is None else list(self.diff)
        return {"kind": self.kind, "place": self.place, "before": self.before or None, "diff": diff}


def code_changes(old: Mapping[str, str], new: Mapping[str, str], text_of: Texts) -> list[CodeChange]:
    """The changes from old to new hashes by place, in the order of the places."""
    removed = [place for place in old if place not in new]
    found = []
    for place in sorted(new):
        if place not in old:
            origin = _origin(place, new[place], old, removed, text_of)
            if origin:
                removed.remove(origin)
                same_name = origin.partition(":")[2] == place.partition(":")[2]
                found.append(CodeChange("moved" if same_name else "renamed", place, origin))
            else:
                found.append(CodeChange("added", place))
        elif old[place] != new[place]:
            before, after = text_of(place, old[place]), text_of(place, new[place])
            known = before is not None and after is not None
            found.append(CodeChange("changed", place, diff=_diff(place, before or "", after or "") if known else None))
    found += [CodeChange("removed", place) for place in removed]
    return sorted(found, key=lambda change: change.place)


def _origin(place: str, hash: str, old: Mapping[str, str], removed: Sequence[str], text_of: Texts) -> str | None:
    """Where a definition stood before, by the same hash, or by the same text but for its own name."""
    name = place.partition(":")[2]
    text = text_of(place, hash)
    for candidate in removed:
        if old[candidate] == hash:
            return candidate
        before = text_of(candidate, old[candidate])
        if text and before and re.sub(rf"\b{re.escape(candidate.partition(':')[2])}\b", name, before) == text:
            return candidate
    return None


def _diff(place: str, before: str, after: str) -> tuple[str, ...]:
    import difflib

    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{place} (before)", f"{place} (now)", lineterm=""
    )
    return tuple(lines)


def summary(places: Sequence[str], file_of: Callable[[str], str] = lambda module: module) -> str:
    """One line: each definition by its place where they are few, else how many in which file."""
    if len(places) <= SINGLY_SHOWN:
        return ", ".join(places)
    counts: dict[str, int] = {}
    for place in places:
        module = place.partition(":")[0]
        counts[module] = counts.get(module, 0) + 1
    largest = sorted(counts, key=lambda module: (-counts[module], module))
    parts = [
        f"{counts[module]} definition{'s' if counts[module] > 1 else ''} in {file_of(module)}"
        for module in largest[:SINGLY_SHOWN]
    ]
    rest = len(largest) - SINGLY_SHOWN
    return ", ".join(parts) + (f", and in {counted(rest, 'more file')}" if rest > 0 else "")


def code_text(changes: Sequence[CodeChange], file_of: Callable[[str], str]) -> list[str]:
    """For a user: what changed by file, many of one kind in one file as their number; then the diffs."""
    lines = []
    groups: dict[tuple[str, Kind], list[CodeChange]] = {}
    for change in changes:
        groups.setdefault((change.module, change.kind), []).append(change)
    for (module, kind), members in groups.items():
        if kind in ("moved", "renamed"):
            lines += [f"{change.name} in {file_of(module)}: {kind} from {change.before}" for change in members]
        elif len(members) > SINGLY_SHOWN:
            lines.append(f"{len(members)} definitions in {file_of(module)}: {WORDS[kind]}")
        else:
            names = ", ".join(change.name for change in members)
            lines.append(f"{names} in {file_of(module)}: {WORDS[kind]}")
    diffs = [line for change in changes for line in _shown_diff(change)]
    rest = len(diffs) - DIFF_LINES
    return (
        lines + diffs[:DIFF_LINES] + ([f"... {counted(rest, 'more line')} of differences: --json"] if rest > 0 else [])
    )


def _shown_diff(change: CodeChange) -> list[str]:
    if change.kind != "changed":
        return []
    if change.diff is None:
        return [f"    {change.place}: its earlier text was not kept"]
    if not change.diff:
        return [f"    {change.place}: its text is the same; something that it imports changed"]
    return [f"    {line}" for line in change.diff]
