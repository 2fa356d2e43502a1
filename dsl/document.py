"""A pipeline file with all files that it extends, merged into one document that knows where each value stands.

    extends = "base.toml"          # relative to the file in which it stands; that file may extend another one

Tables are merged key by key, the extending file's values winning; a node that is given another `op` replaces that of
the base as a whole. Places are looked up only when one is asked for, so a file without mistakes is never scanned.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
from attrs import define, field, frozen

from dsl.errors import PipelineError, shortened
from dsl.finding import Field, Finding, Position
from dsl.shown import shown_value
from dsl.toml import KeyPath, key_positions, parsed

EXTENDS = "extends"
TABLE_NAMES = ("pipeline", "mlflow", "machine")  # beside the nodes
LAUNCH = "launch"  # the table of a node that says how it is started


@define(slots=False)
class SourceFile:
    """One TOML file: its text, and the values in it."""

    path: Path
    text: str
    values: dict[str, Any]

    @cached_property
    def positions(self) -> dict[KeyPath, Position]:
        return key_positions(self.text, str(self.path))

    @property
    def folder(self) -> Path:
        return Path(os.path.normpath(self.path.parent.absolute()))

    def holds(self, path: KeyPath) -> bool:
        here: Any = self.values
        for key in path:
            if not isinstance(here, dict) or key not in here:
                return False
            here = here[key]
        return True


@frozen
class Document:
    """The merged values of files, the extending one first."""

    files: tuple[SourceFile, ...]
    values: Mapping[str, Any]

    def position(self, path: KeyPath) -> Position | None:
        """Where a key stands in the first file that has it; None where none has it."""
        source = self._source(path)
        return None if source is None else source.positions.get(path)

    def folder(self, path: KeyPath) -> Path | None:
        """The absolute folder of the file whose value counts."""
        source = self._source(path)
        return None if source is None else source.folder

    def table(self, name: str) -> Mapping[str, Any]:
        """A table of the top level; empty where there is none."""
        value = self.values.get(name)
        return value if isinstance(value, dict) else {}

    def place_of(self, position: Position) -> tuple[int, int, int]:
        """For sorting: files in their order, then lines."""
        names = [str(source.path) for source in self.files]
        place = names.index(position.file) if position.file in names else len(names)
        return place, position.line, position.column

    def _source(self, path: KeyPath) -> SourceFile | None:
        return next((source for source in self.files if source.holds(path)), None)


@frozen
class Places:
    """Where the values of a table, such as a node's, are: in a file, or on the command line.

    elsewhere: fields that were given somewhere else than in the table.
    """

    document: Document | None = None
    table: KeyPath = ()
    elsewhere: Mapping[str, KeyPath | Position] = field(factory=dict)

    def position(self, name: str) -> Position | None:
        """That of "field", "table.field" or "launch.field", of a table on the command line that of a key in it, else
        that of the node as a whole.
        """
        given = self.elsewhere.get(name)
        if isinstance(given, Position):
            return given
        if given is not None:
            return self._first([given])
        inside = (each for key, each in self.elsewhere.items() if name and key.startswith(f"{name}."))
        of_key = next((each for each in inside if isinstance(each, Position)), None)
        return self._first(self._paths(name)) or of_key or self._first([self.table])

    def folder(self, name: str) -> Path | None:
        """The folder that a relative path in the field starts from; None: that of the pipeline."""
        given = self.elsewhere.get(name)
        if self.document is None or len(self.document.files) == 1 or isinstance(given, Position):
            return None
        return self.document.folder(given or (*self.table, *name.split(".")))

    def path(self, name: str) -> str:
        """How the user's file calls the field: `node.train.lr`, `for_each.draft.small.train.lr`."""
        given = self.elsewhere.get(name)
        where = given if isinstance(given, tuple) else (*self.table, *([name] if name else []))
        return ".".join(str(key) for key in where)

    def moved(self, places: Mapping[str, KeyPath | Position]) -> Places:
        return attrs.evolve(self, elsewhere={**self.elsewhere, **places})

    def _paths(self, name: str) -> list[KeyPath]:
        """What to look for, in this order: the key, and for "launch.field" the key in the table."""
        return [(*self.table, name), (*self.table, *name.split("."))] if name else []

    def _first(self, paths: Iterable[KeyPath]) -> Position | None:
        if self.document is None:
            return None
        positions = map(self.document.position, paths)
        return next((position for position in positions if position is not None), None)


def read_document(file: Path) -> Document:
    """Read a file and all that it extends. Raises PipelineError where one of them cannot be read."""
    files = [_read(file, None)]
    seen = [os.path.realpath(file)]
    while EXTENDS in files[-1].values:
        base, position = _base_of(files[-1])
        source = _read(base, position)
        real = os.path.realpath(base)
        if real in seen:
            shown = [str(each.path) for each in files[seen.index(real) :]]
            message = f"the files extend each other: {' -> '.join([*shown, str(base)])}"
            raise PipelineError([Finding(message, Field(EXTENDS, position))])
        files.append(source)
        seen.append(real)
    values: dict[str, Any] = {}
    for source in reversed(files):
        values = merged(values, source.values)
    values.pop(EXTENDS, None)
    return Document(tuple(files), values)


def merged(base: Mapping[str, Any], over: Mapping[str, Any], path: KeyPath = ()) -> dict[str, Any]:
    """The tables as one, key by key; neither of them is changed. The recursion is as deep as the tables are nested."""
    result = dict(base)
    for key, value in over.items():
        before = base.get(key)
        if isinstance(value, dict) and isinstance(before, dict) and not _is_another_op(before, value, (*path, key)):
            result[key] = merged(before, value, (*path, key))
        else:
            result[key] = value
    return result


def _is_another_op(base: Mapping[str, Any], over: Mapping[str, Any], path: KeyPath) -> bool:
    return len(path) == 2 and path[0] == "node" and "op" in over and over["op"] != base.get("op", over["op"])


def _base_of(source: SourceFile) -> tuple[Path, Position | None]:
    value = source.values[EXTENDS]
    position = source.positions.get((EXTENDS,))
    if not isinstance(value, str) or not value:
        message = f"expected the path of another pipeline file, got {shown_value(value)}"
        raise PipelineError([Finding(message, Field(EXTENDS, position), 'extends = "base.toml"')])
    base = Path(os.path.normpath(source.path.parent / value))
    if base.suffix != ".toml":
        raise PipelineError(
            [Finding(f"only a TOML file can be extended, not {shortened(str(base), 300)}", Field(EXTENDS, position))]
        )
    return base, position


def _read(file: Path, named_at: Position | None) -> SourceFile:
    """named_at: where another file extends this one."""
    try:
        data = file.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        message = f"the pipeline file {file} cannot be read: {reason}"
        raise PipelineError([Finding(message, Field(EXTENDS if named_at else "", named_at))]) from error
    try:
        text = data.decode("utf-8-sig")  # editors put a mark before the first line
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        column = len(error.object[: error.start].split(b"\n")[-1].decode()) + 1
        raise PipelineError(
            [Finding("the file is not UTF-8", Field(position=Position(str(file), line, column)))]
        ) from error
    return SourceFile(file, text, parsed(text, str(file)))
