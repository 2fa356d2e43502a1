"""A pipeline as one tree of plain tables, and the place of every path in it: file, line and column, or an argument.

    extends = "base.toml"          # relative to the file in which it stands; that file may extend another one

All that changes a pipeline rewrites this tree: `extends` here, `-s` too, `[for_each]` and `[sweep]` in for_each.py,
`${...}` in interpolation.py. Then compile.py makes a graph of it. Tables of files that extend each other
are merged key by key, the extending file's values winning; a node that is given another `op` replaces that of the base
as a whole. Places are looked up only when one is asked for, so a file without mistakes is never scanned.

`-s node.field=value` changes single values, as strictly checked as in the file:

    -s train.lr=3e-4                    a field; the value is TOML, and a bare word is a text where the field is one
    -s capture.target_layer_ids=[1,2]   a list
    -s node.headers.accept=x            one key of a field that is a table
    -s train.dspark.rank=128            one field of a table that the op declares
    -s train.launch.nproc=2             one field of the launch; -s train.launch={...}: all of it
    -s pipeline.seed=1                  a field of [pipeline], [mlflow] or [machine]
    -s train.lr=none                    None where the field may be none, else the op's default again
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
from attrs import define, frozen

from dsl.convert import member_type, type_mistake, typed_value
from dsl.errors import PipelineError, known_nodes, shortened
from dsl.finding import Field, Finding, Position
from dsl.launch import FIELDS, LAUNCH, LAUNCH_FIELD, TABLE_NAMES
from dsl.op import ConfigField, OpSpec
from dsl.pipeline import Copy
from dsl.shown import shown_value
from dsl.toml import KeyPath, key_positions, parsed

EXTENDS = "extends"
Origin = tuple[KeyPath, Position | None]


@define(slots=False)
class SourceFile:
    """A TOML file: its text, and its values."""

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


@define
class Tree:
    """The tables of a pipeline by name, its nodes under "node"; a node's `op` is a name or an OpSpec.

    files: the files that were read, the extending file first. root: the folder that relative paths start from. find_op:
    finds an op by the value of `op`, or returns None. knows_all_ops: whether all op files could be read. is_literal:
    texts hold no references, as in Python; `${...}` is one only in arguments. origins: for a moved value, the path it
    came from and the argument that set it. copies: copied node -> its origin. mistakes: all found so far; a value with
    a mistake is NOTHING.
    """

    values: dict[str, Any]
    root: Path
    files: tuple[SourceFile, ...] = ()
    op_files: tuple[Path, ...] = ()
    find_op: Callable[[Any], OpSpec | None] = lambda op: op if isinstance(op, OpSpec) else None
    knows_all_ops: bool = True
    is_literal: bool = False
    origins: dict[KeyPath, Origin] = attrs.field(factory=dict)
    copies: dict[str, Copy] = attrs.field(factory=dict)
    mistakes: list[Finding] = attrs.field(factory=list)

    @property
    def nodes(self) -> Mapping[str, Any]:
        return self.table("node")

    def table(self, *path: str | int) -> dict[str, Any]:
        """The table at a path; empty where there is none."""
        here: Any = self.values
        for key in path:
            here = here.get(key) if isinstance(here, dict) else None
        return here if isinstance(here, dict) else {}

    def op(self, node_id: str) -> OpSpec | None:
        return self.find_op(self.table("node", node_id).get("op"))

    def fields(self, owner: str) -> Mapping[str, ConfigField]:
        """The fields of a node, including its launch table, or the fields of a table beside the nodes."""
        if owner in FIELDS:
            return FIELDS[owner]
        op = self.op(owner)
        return {LAUNCH: LAUNCH_FIELD, **({} if op is None else op.fields)}

    def template(self, node_id: str) -> str:
        """The node's id in the file; for a copy, the id of the node that it is a copy of."""
        return self.copies[node_id].template if node_id in self.copies else node_id

    def templates(self, node_ids: Iterable[str]) -> list[str]:
        """The ids in the file of these nodes, without repetition; copies give the id of the copied node."""
        return list(dict.fromkeys(map(self.template, node_ids)))

    def field(self, path: KeyPath) -> ConfigField | None:
        """The declaration of a field of a node, or of a field in one of its tables; None for any other path."""
        owner, *names = map(str, path[1:] if path[0] == "node" else path)
        fields, found = self.fields(owner), None
        for name in names:
            found = fields.get(name)
            fields = {} if found is None else found.fields
        return found

    def put(self, path: KeyPath, value: Any, position: Position) -> None:
        """Set a value that a command line argument gives."""
        table: Any = self.values
        for end, key in enumerate(path[:-1], start=1):
            if not isinstance(table.get(key), dict):
                if key in table:
                    self.origins[path[:end]] = (path[:end], position)
                table[key] = {}
            table = table[key]
        table[path[-1]] = value
        for each in (path, *((*path, key) for key in (value if isinstance(value, dict) else ()))):
            self.origins[each] = (each, position)

    def origin(self, path: KeyPath) -> Origin:
        """The origin of the value at a path: a path in the files, or the argument that gave it.

        A table may be taken from several places: the nearest that has the value counts.
        """
        there: Origin = path, None
        for end in range(len(path), 0, -1):
            if found := self.origins.get(path[:end]):
                there = (*found[0], *path[end:]), found[1]
                there = there if found[1] is not None else self.origin(there[0])
                if there[1] is not None or self._source(there[0]) is not None:
                    break
        return there

    def position(self, path: KeyPath) -> Position | None:
        """The position of a value in a file; else of an argument that sets a key in it; else of the nearest table
        around.
        """
        where, given = self.origin(path)
        found = given or self._in_files(where) or self._given_inside(path) or self._given_inside(where)
        return found or next(filter(None, (self._in_files(where[:end]) for end in range(len(where) - 1, 0, -1))), None)

    def is_argument(self, path: KeyPath) -> bool:
        """Whether the command line gave the value."""
        return self.origin(path)[1] is not None

    def folder(self, path: KeyPath) -> Path:
        """The folder that a relative path in the value starts from."""
        where, given = self.origin(path)
        source = self._source(where) if given is None and len(self.files) > 1 else None
        return self.root if source is None else source.folder

    def report(self, path: KeyPath, message: str, hint: str = "") -> None:
        self.mistakes.append(self.mistake(path, message, hint))

    def mistake(self, path: KeyPath, message: str, hint: str = "") -> Finding:
        """A mistake at a value, with the path that the user wrote, and its place in the file if known."""
        where, _ = self.origin(path)
        position = self.position(path)
        if position is not None and position.is_argument:
            where = where[1:] if where[0] in ("node", "sweep") else where
            given = position.file.partition(" ")[2].partition("=")[0].strip()
            where = () if given in (_dotted(where), _dotted(path[1:])) else where
        return Finding(message, Field(_dotted(where), position), hint)

    def _source(self, path: KeyPath) -> SourceFile | None:
        return next((source for source in self.files if source.holds(path)), None)

    def _in_files(self, path: KeyPath) -> Position | None:
        source = self._source(path)
        return None if source is None else source.positions.get(path)

    def _given_inside(self, path: KeyPath) -> Position | None:
        given = (origin[1] for at, origin in self.origins.items() if at[: len(path)] == path and len(at) > len(path))
        return next(filter(None, given), None)


def owner_path(owner: str) -> KeyPath:
    """The path in the tree of a node, or of a table beside the nodes."""
    return (owner,) if owner in FIELDS else ("node", owner)


def cells(values: Mapping[str, Any], fields: Mapping[str, ConfigField]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values by (field,), and those in a node's tables by (table, field)."""
    for name, value in values.items():
        inside = table_values(value) if name in fields and fields[name].table is not None else None
        yield from [((name,), value)] if inside is None else (((name, key), each) for key, each in inside.items())


def table_values(value: Any) -> dict[str, Any] | None:
    """The values of a table, given as a dict or as an attrs object; None for any other value."""
    if isinstance(value, dict):
        return value
    return attrs.asdict(value, recurse=False) if attrs.has(type(value)) else None


def read_tree(file: Path) -> Tree:
    """Parse a pipeline file and all files that it extends. Raises PipelineError where one of them cannot be read."""
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
    return Tree(values, files[0].folder, tuple(files))


def merged(base: Mapping[str, Any], over: Mapping[str, Any], path: KeyPath = ()) -> dict[str, Any]:
    """The tables merged key by key; values of `over` win and are copied. Neither argument is changed."""
    result = dict(base)
    for key, value in over.items():
        before = base.get(key)
        if isinstance(value, dict) and isinstance(before, dict) and not _is_another_op(before, value, (*path, key)):
            result[key] = merged(before, value, (*path, key))
        else:
            result[key] = merged({}, value, (*path, key)) if isinstance(value, dict) else value
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
        message = f"only a TOML file can be extended, not {shortened(str(base), 300)}"
        raise PipelineError([Finding(message, Field(EXTENDS, position))])
    return base, position


def _read(file: Path, named_at: Position | None) -> SourceFile:
    """Read and parse a pipeline file. named_at: the place where another file extends it. Raises PipelineError."""
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


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


NONE = "none"


@frozen
class Override:
    """An override from the command line, `-s owner.field=value`. owner: a node, or a table such as "pipeline"."""

    owner: str
    field: str
    text: str
    position: Position


def parsed_overrides(texts: Sequence[str]) -> tuple[list[Override], list[Finding]]:
    overrides, mistakes = [], []
    for text in texts:
        path, equals, value = (part.strip() for part in text.partition("="))
        owner, _, field = path.partition(".")
        position = Position(f"-s {text}", is_argument=True)
        if not equals or not owner or not all(field.split(".")):
            from dsl.aliases import alias_hint  # only for mistakes

            alias = None if field or not equals else alias_hint(owner, "", {})
            hint = "" if alias is None else alias.text
            mistakes.append(Finding("expected node.field=value", Field(position=position), hint))
        elif field == "op" and owner not in TABLE_NAMES:
            message = "-s changes a node's values, not its op"
            mistakes.append(Finding(message, Field(position=position), "change the op in the file"))
        elif owner == "pipeline" and field in ("ops", "drafts"):
            message = f"-s cannot change pipeline.{field}"
            mistakes.append(Finding(message, Field(position=position), "change it in the file"))
        else:
            overrides.append(Override(owner, field, value, position))
    return overrides, mistakes


def put_overrides(tree: Tree, overrides: Sequence[Override]) -> list[Override]:
    """Put the values of overrides into the tree, unchecked. Returns the overrides of nodes that the tree lacks."""
    others = []
    for override in overrides:
        if override.owner not in (*TABLE_NAMES, *tree.nodes):
            others.append(override)
            continue
        holder = tree.nodes if override.owner in tree.nodes else tree.values
        try:
            if isinstance(holder.get(override.owner, {}), dict):  # what is no table is reported as such
                _put(tree, override)
        except ValueError as error:
            tree.mistakes.append(Finding(str(error), Field(position=override.position)))
    return others


def unknown_owner(override: Override, nodes: Sequence[str]) -> Finding:
    copies = [node_id for node_id in nodes if node_id.startswith(f"{override.owner}-")]
    hint = f"its copies: {', '.join(copies)}" if copies else known_nodes(override.owner, nodes, TABLE_NAMES)
    return Finding(f'there is no node "{shortened(override.owner)}"', Field(position=override.position), hint)


def overridden_nodes(overrides: Sequence[str]) -> dict[str, str]:
    """A mapping from each override that changes a node to the node's id."""
    owners = {text: text.partition(".")[0].strip() for text in overrides}
    return {text: owner for text, owner in owners.items() if owner not in TABLE_NAMES}


def changed_values(overrides: Sequence[str]) -> list[str]:
    """The overrides that change what is computed: those of nodes, and of the seed."""
    return [text for text in overrides if text in overridden_nodes([text]) or text.startswith("pipeline.seed")]


def _put(tree: Tree, override: Override) -> None:
    """Put one override into the tree. Raises ValueError for a text that opens a TOML value but is invalid."""
    fields = tree.fields(override.owner)
    path, expected, has_default = _declared(fields, override.field)
    op = tree.op(override.owner)
    if op is not None and (edge := op.edges.get(override.field)) is not None:
        expected = str | None if edge.optional else str
    whole = (*owner_path(override.owner), *path)
    field = fields.get(str(path[0]))
    if len(path) == 2 and field is not None and field.table is None:
        table = tree.table(*whole[:-1]) or dict(field.made_default if isinstance(field.made_default, dict) else {})
        tree.put(whole[:-1], table, override.position)  # in which a wrong key is a mistake of the whole
    is_reset = override.text == NONE and has_default and type_mistake(expected, None) is not None
    tree.put(whole, None if is_reset else typed_value(override.text, expected), override.position)
    if is_reset:
        del tree.table(*whole[:-1])[str(path[-1])]


def _declared(fields: Mapping[str, ConfigField], text: str) -> tuple[KeyPath, Any, bool]:
    """The path of a dotted name, the type of its value, and whether it has a default.

    Names: "field", "table.field" or "field.key". Everything after a field that is no declared table is one key.
    """
    name, dot, rest = text.partition(".")
    field = fields.get(name)
    if field is None or not dot:
        return (
            (name, rest) if dot else (name,),
            str if field is None else field.type,
            field is not None and not field.required,
        )
    if field.table is None:
        return (name, rest), member_type(field.type, dict), True
    path, expected, has_default = _declared(field.fields, rest)
    return (name, *path), expected, has_default
