"""The code that enters a node's key: a digest of every module of the project that its run function can import.

    {"ops/ingest/run.py": digest, "ops/artifacts.py": digest, "ops/lib/kernels/sweep.c": digest, ...}

A module is in this closure where a module of it imports it: at the top or inside a function, or by
`import_module("written.out")`; with the `__init__.py` of every package above it. Nothing is imported to find out. Its
digest is of its syntax tree without docstrings, comments, formatting and the `help` of fields, in an encoding of our
own, since `ast.dump` differs between Pythons. The config class of an op is left out where a key has it by itself, or
what has no part in results: its `@op`, its fields and its hooks. A file that `pkgutil.get_data("package", "file")`
reads counts by its content.

Not seen is what is found at run time only: names in strings (exec, import_module of a constant or a computed name),
modules found through a sys.path that the code changes, other programs. A stage that loads such a module reports it.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.encoding import encode
from dsl.errors import ConfigError
from dsl.imports import INSTALLED, is_standard
from dsl.op_class import OUTSIDE_KEY

FRAMEWORK = frozenset({"dsl", "executor"})  # never part of a node's code
OWN_PACKAGES = frozenset({"ops", "pipelines"})  # what is the project's own in a folder of installed packages
INIT = "__init__.py"

DataFile = tuple[str, str]  # (package, file in its folder)

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_SKIPPED = frozenset({"ctx", "type_comment", "type_ignores", "kind"})
_FIELDS: dict[type, list[str]] = {
    kind: [name for name in kind._fields if name not in _SKIPPED]
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}


@frozen
class ModuleSource:
    """The facts of one source file from which cache keys are made.

    digest: hash of its syntax tree. sha256: hash of its bytes. imports: the dotted names that it imports; relative ones
    keep their dots: `from ..a import b` is "..a.b". data: the data files that it reads. names: the names bound at its
    top level; "*" where more may be bound.
    """

    digest: str
    sha256: str
    imports: tuple[str, ...]
    data: tuple[DataFile, ...]
    names: tuple[str, ...]


@frozen
class Closure:
    """The code that a run function can import.

    digests: the digest of each file, by its path relative to its search folder. read: the SHA-256 of each file.
    """

    digests: dict[str, str]
    read: dict[Path, str]


def read_source(path: Path) -> ModuleSource:
    """Parse a source file; equal content is parsed only once. Raises ConfigError for a file that is not Python."""
    return parse_source(path, path.read_bytes())


@lru_cache(maxsize=4096)
def parse_source(path: Path, source: bytes) -> ModuleSource:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is not Python: {error}") from error
    if b"dsl.op" in source:
        _leave_out_declarations(tree)
    imports: dict[str, None] = {}
    data: dict[DataFile, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports.update((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imports.update((_imported(node, alias.name), None) for alias in node.names)
        elif isinstance(node, ast.Call):
            match _last_name(node.func), node.args:
                case "import_module" | "__import__", [ast.Constant(str() as name), *_] if not name.startswith("."):
                    imports[name] = None
                case "get_data", [ast.Constant(str() as package), ast.Constant(str() as file)]:
                    data[package, file] = None
    return ModuleSource(
        hashlib.sha256(encode_tree(tree)).hexdigest(),
        hashlib.sha256(source).hexdigest(),
        tuple(imports),
        tuple(data),
        tuple(sorted(_top_names(tree))),
    )


class Project:
    """The source files under some root folders, searched in Python's order: the first root wins.

    A root of the standard library or of installed packages is not followed, but it hides modules of the same name in
    later roots. An object reads every file and folder only once.
    """

    def __init__(self, roots: Sequence[Path], read: Callable[[Path], ModuleSource] = read_source) -> None:
        self._roots = roots
        self._read = cache(read)
        self._find = cache(self._find_module)
        self._names = cache(_names_in)

    def closure(self, functions: Sequence[str], classes: Sequence[str] = ()) -> Closure:
        """All modules of the project that functions and classes can import, with their digests.

        Each is given as "module:name". A class of another project is left out. Raises ConfigError where a function is
        not in its module.
        """
        for function in functions:
            self._check(function)
        digests: dict[str, str] = {}
        read: dict[Path, str] = {}
        seen: set[str] = set()
        pending = [place.partition(":")[0] for place in (*functions, *classes)]
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            pending += [name.rpartition(".")[0]] if "." in name else []
            module = self._find(name)
            if module.file is None:
                continue
            source = self._read(module.file)
            digests[module.name], read[module.file] = source.digest, source.sha256
            pending += [module.absolute(imported) for imported in source.imports]
            for file in source.data:
                self._add_data(file, digests, read)
        return Closure(dict(sorted(digests.items())), read)

    def _check(self, function: str) -> None:
        module_name, _, name = function.partition(":")
        module = self._find(module_name)
        if module.file is None:
            places = ", ".join(map(str, self._roots))
            raise ConfigError(f'run = "{function}": there is no module {module_name} under {places}')
        names = self._read(module.file).names
        if name not in names and "*" not in names:
            raise ConfigError(f'run = "{function}": the module {module_name} has no function {name}')

    def _add_data(self, file: DataFile, digests: dict[str, str], read: dict[Path, str]) -> None:
        package, name = file
        place = next((folder / name for folder in self._find(package).folders if (folder / name).is_file()), None)
        if place is not None:
            content = hashlib.sha256(place.read_bytes()).hexdigest()
            digests[f"{package.replace('.', '/')}/{name}"] = read[place] = content

    def _find_module(self, name: str) -> _Module:
        package, _, last = name.rpartition(".")
        if not name or name in FRAMEWORK or name in sys.builtin_module_names:
            return _Module("")
        path = name.replace(".", "/")
        portions = []
        for folder in self._find(package).folders if package else self._roots:
            is_foreign = not package and _is_foreign(name, folder)
            if last in (names := self._names(folder)) and INIT in (inside := self._names(folder / last)):
                return _Module("") if is_foreign else _Module(f"{path}/{INIT}", folder / last / INIT, (folder / last,))
            if f"{last}.py" in names and not is_foreign:
                return _Module(f"{path}.py", folder / f"{last}.py")
            if any(f"{last}{suffix}" in names for suffix in (".py", *EXTENSION_SUFFIXES, *BYTECODE_SUFFIXES)):
                return _Module("")
            if last in names and inside and not is_foreign:
                portions.append(folder / last)
        return _Module("", None, tuple(portions))  # a package without __init__ is all folders of its name together


@frozen
class _Module:
    """A module found under a root. name: its file's path from the root.

    file: None for a package without `__init__`, and for modules that are not the project's. folders: those in which a
    package's modules are.
    """

    name: str
    file: Path | None = None
    folders: tuple[Path, ...] = ()

    def absolute(self, imported: str) -> str:
        """The absolute name of an imported module; relative names start from this module."""
        relative = imported.lstrip(".")
        level = len(imported) - len(relative)
        if not level:
            return imported
        folders = self.name.split("/")[:-level]
        return ".".join([*folders, relative] if relative else folders)


def _names_in(folder: Path) -> frozenset[str]:
    """The names in a folder; empty if it is no folder."""
    try:
        with os.scandir(folder) as entries:
            return frozenset(entry.name for entry in entries)
    except OSError:
        return frozenset()


def _is_foreign(name: str, folder: Path) -> bool:
    """Whether a root's module of this name belongs to the standard library or an installed package."""
    is_installed = not INSTALLED.isdisjoint(folder.parts)
    return is_standard(str(folder)) or (is_installed and name not in OWN_PACKAGES)


def _leave_out_declarations(tree: ast.Module) -> None:
    """Remove the declarations from classes with `@op(...)`: the decorator, the fields, and the names in OUTSIDE_KEY."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(map(_is_op, node.decorator_list)):
            node.decorator_list = [each for each in node.decorator_list if not _is_op(each)]
            node.body = [member for member in node.body if not _is_declaration(member)]


def _is_op(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and _last_name(decorator.func) == "op"


def _is_declaration(member: ast.stmt) -> bool:
    match member:
        case ast.AnnAssign(target=ast.Name(name)):
            return name in OUTSIDE_KEY or "ClassVar" not in ast.unparse(member.annotation)
        case ast.FunctionDef(name) | ast.Assign(targets=[ast.Name(name)]):
            return name in OUTSIDE_KEY
    return False


def _imported(statement: ast.ImportFrom, name: str) -> str:
    source = "." * statement.level + (statement.module or "")
    if name == "*":
        return source
    return f"{source}.{name}" if statement.module else f"{source}{name}"


def _last_name(function: ast.expr) -> str:
    """The last part of a dotted name: `field` for `field` and for `dsl.op.field`; "" for other expressions."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _top_names(tree: ast.Module) -> Iterator[str]:
    """The names that a module binds outside functions and classes; "*" among them where it may bind others."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, _DOCUMENTED[1:]):
            yield "*" if node.name == "__getattr__" else node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        else:
            pending += ast.iter_child_nodes(node)


def encode_tree(tree: ast.AST) -> bytes:
    """The canonical bytes of a syntax tree; two trees give equal bytes only if their code is the same.

    A node is encoded as its class, the names of its non-empty fields, and their values in the same order. Empty fields
    and None are left out, so that a field which a later Python adds changes nothing. No recursion.
    """
    parts: list[bytes] = []
    pending: list[Any] = [tree]
    while pending:
        item = pending.pop()
        if isinstance(item, ast.AST):
            names, values = _written_fields(item)
            parts.append(_header(type(item).__name__, names))
            pending += reversed(values)
        elif isinstance(item, list):
            parts.append(b"[%d" % len(item))
            pending += reversed(item)
        elif isinstance(item, complex):
            parts.append(b"c" + encode([item.real, item.imag]))
        elif item is ...:
            parts.append(b".")
        else:
            parts.append(encode(item))
    return b"".join(parts)


def _written_fields(node: ast.AST) -> tuple[tuple[str, ...], list[Any]]:
    """The names and values of a syntax node's fields that enter its encoding; empty fields are left out."""
    names, values = [], []
    for name in _FIELDS[type(node)]:
        value = getattr(node, name, None)
        if isinstance(value, list):
            value = _written(node, name, value)
            if not value:
                continue
        elif value is None:
            continue
        names.append(name)
        values.append(value)
    return tuple(names), values


def _written(node: ast.AST, name: str, members: list[Any]) -> list[Any]:
    """The members of a list in the syntax tree that enter its digest: no docstrings, and no `help` of fields."""
    if name == "body" and isinstance(node, _DOCUMENTED):
        return [member for member in members if not _is_text(member)]
    if name == "keywords" and isinstance(node, ast.Call) and _last_name(node.func) == "field":
        return [member for member in members if member.arg != "help"]
    if isinstance(node, ast.JoinedStr):  # Python 3.12.0 ends some f-strings with an empty string
        return [part for part in members if not (isinstance(part, ast.Constant) and part.value == "")]
    return members


def _is_text(statement: ast.stmt) -> bool:
    """Whether the statement is a bare string."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


@cache
def _header(kind: str, names: tuple[str, ...]) -> bytes:
    return f"({' '.join([kind, *names])})".encode()
