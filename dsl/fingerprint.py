"""What enters a node's key: its config, and the code that its run function reaches."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from attrs import frozen

from dsl.encoding import encode, fingerprint
from dsl.errors import ConfigError
from dsl.graph import GraphNode
from dsl.import_side_effects import is_mutable
from dsl.imports import INSTALLED, is_standard, places_of
from dsl.op import ConfigField
from dsl.secrets import without_secrets
from dsl.source import MODULE_LEVEL, Binding, DataFile, SourceModule, read_module
from dsl.syntax import Chain, used_names

__all__ = ["ReadCode", "code_fingerprints", "encode", "fingerprint", "key_config", "kind_of", "read_code"]

FRAMEWORK = frozenset({"dsl", "executor"})  # never part of a node's code
OWN_PACKAGES = frozenset({"ops", "pipelines"})  # what is the project's own in a folder of installed packages


Kind = Literal["file", "folder", ""]  # of what a path leads to; "" where there is neither


@frozen
class ReadCode:
    """The code that a run function reaches: a hash by "module:symbol", and all that the hashes depend on.

    read: the SHA-256 of each source file. looked_for: what stood at each other path where a module might have been.
    `text` gives the source of a symbol.
    """

    hashes: dict[str, str]
    read: dict[Path, str]
    looked_for: dict[Path, Kind]
    modules: Mapping[str, SourceModule | None]
    data: Mapping[DataFile, bytes]

    def text(self, place: str) -> str:
        """The lines of "module:symbol" as they are written, decorators included, and the data files that it reads."""
        module_name, _, name = place.partition(":")
        module = self.modules[module_name]
        if module is None:
            return ""
        files = [self.data[file].decode("utf-8", "replace") for file in sorted(module.symbol(name).data)]
        return "".join([module.text_of(name), *files])


def key_config(node: GraphNode) -> dict[str, object]:
    """The config as it enters the key: without neutral fields, edges and external paths; tables with their defaults.

    Edges and external paths enter by the digest of their content. An external field that names something built in,
    or a model id, enters by that name. Of a list of paths the places are left.
    """
    return _keyed(node.op.fields, node.config)


def _keyed(fields: Mapping[str, ConfigField], config: object) -> dict[str, object]:
    keyed: dict[str, object] = {}
    for field in fields.values():
        value = getattr(config, field.name)
        if field.neutral or (field.external and is_path(value)):
            continue
        if field.external and isinstance(value, tuple):
            value = tuple(None if is_path(member) else member for member in value)
        is_table = field.table is not None and value is not None
        keyed[field.name] = _keyed(field.fields, value) if is_table else without_secrets(value)
    return keyed


def code_fingerprints(run: str, roots: Sequence[Path]) -> dict[str, str]:
    """The hashes of `read_code` for a run function."""
    return read_code([run], roots).hashes


def read_code(functions: Sequence[str], roots: Sequence[Path], classes: Sequence[str] = ()) -> ReadCode:
    """ "module:symbol" -> hash, for functions and classes "module:symbol" and every symbol of the project they reach.

    The project is the source files under the roots, the first root first, as Python looks for modules: a root that is
    the standard library's or holds installed packages hides what has the same name behind it, and is not followed.
    Nothing is imported: names and attributes of modules are followed statically, through imports and re-exports,
    `import_module("written.out")` included; `pkgutil.get_data("package", "file")` reads a file whose content counts.
    "module:<module>" is the statements with side effects of a module that is imported on the way. What such a module
    adds to the project's own tables counts (by decorators and calls, see dsl/import_side_effects.py, by
    `__init_subclass__` or a metaclass), and where code calls `__subclasses__`, all subclasses of the classes that
    count. A symbol's hash covers its syntax tree and what the imported names in it mean. A class that is not under the
    roots is left out.

    Not seen is what is found at run time only: names in strings (getattr, globals, eval, exec, import_module of a
    constant or a computed name), modules found through a sys.path that the code changes, what a plain function does
    to its arguments in `X = change(TABLE)`, other programs.
    Raises ConfigError where a function is not there.
    """
    project = _Project(roots)
    pending = [place for function in functions for place in project.function(function)]
    pending += [place for symbol in classes for place in project.class_or_module(symbol)]
    hashes: dict[str, str] = {}
    while pending:
        _follow(project, pending, hashes)
        pending = project.subclasses(hashes) if project.asks_for_subclasses else []
    return ReadCode(dict(sorted(hashes.items())), project.read, project.looked_for, project.modules, project.data)


def _follow(project: _Project, pending: list[tuple[str, str]], hashes: dict[str, str]) -> None:
    """Add the hashes of the symbols and of all that they reach."""
    while pending:
        module_name, name = pending.pop()
        place = f"{module_name}:{name}"
        if place in hashes:
            continue
        module = project.module(module_name)
        assert module is not None
        symbol = module.symbol(name)
        meanings = set()
        for chain in symbol.uses:
            reached, names = project.resolve(module, chain, symbol.imports)
            pending += reached
            meanings |= names
        meanings |= {f"{'/'.join(file)} = {hashlib.sha256(project.data_of(file)).hexdigest()}" for file in symbol.data}
        for binding in [(module_name, None), *symbol.imported]:
            project.enter(binding, pending)
        project.asks_for_subclasses |= b"__subclasses__" in symbol.encoded
        hashes[place] = hashlib.sha256(symbol.encoded + encode(sorted(meanings))).hexdigest()


def is_path(value: object) -> bool:
    """Whether the compiled value of an external field names a file or folder, whose content enters the key."""
    return isinstance(value, str) and Path(value).is_absolute()


def kind_of(path: Path) -> Kind:
    """What a path leads to."""
    if path.is_file():
        return "file"
    return "folder" if path.is_dir() else ""


class _Project:
    """The modules under the roots, found and parsed when they are first asked for."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots
        self.modules: dict[str, SourceModule | None] = {}
        self.folders: dict[str, list[Path]] = {}  # of each package: where its modules are
        self.entered: set[str] = set()
        self.read: dict[Path, str] = {}
        self.looked_for: dict[Path, Kind] = {}
        self.data: dict[DataFile, bytes] = {}
        self.asks_for_subclasses = False

    def function(self, run: str) -> list[tuple[str, str]]:
        """What "module:function" is, and what runs when its module is imported. Raises ConfigError."""
        module_name, _, name = run.partition(":")
        module = self.module(module_name)
        if module is None:
            places = ", ".join(map(str, self.roots))
            raise ConfigError(f'run = "{run}": there is no module {module_name} under {places}')
        found, _meanings = self.resolve(module, (name,), {})
        if not found:
            raise ConfigError(f'run = "{run}": the module {module_name} has no function {name}')
        self.enter((module_name, None), found)
        return found

    def class_or_module(self, symbol: str) -> list[tuple[str, str]]:
        """The same of "module:class"; nothing where the module is not the project's, all of it where the class has
        another name there.
        """
        module_name, _, name = symbol.partition(":")
        module = self.module(module_name)
        if module is None:
            return []
        found = self.resolve(module, (name,), {})[0] or self.resolve(module, (), {})[0]
        self.enter((module_name, None), found)
        return found

    def module(self, name: str) -> SourceModule | None:
        if name not in self.modules:
            self.modules[name] = self._find(name)
        return self.modules[name]

    def data_of(self, file: DataFile) -> bytes:
        """What a data file of a package holds; nothing where it is not there, or not the project's."""
        if file not in self.data:
            package, name = file
            self.module(package)
            places = [folder / name for folder in self.folders.get(package, ())]
            place = next((place for place in places if self._kind(place) == "file"), None)
            self.data[file] = place.read_bytes() if place else b""
            if place:
                self.read[place] = hashlib.sha256(self.data[file]).hexdigest()
        return self.data[file]

    def resolve(
        self, module: SourceModule, chain: Chain, local_imports: dict[str, list[Binding]]
    ) -> tuple[list[tuple[str, str]], set[str]]:
        """The symbols of the project that a chain of names means in a module, and what its imported names mean."""
        reached: list[tuple[str, str]] = []
        meanings: set[str] = set()
        pending = [(module, chain)]
        seen = set()
        while pending:
            here, parts = pending.pop()
            if (here.name, parts) in seen:
                continue
            seen.add((here.name, parts))
            if not parts:  # the module itself is used as a value
                reached += [(here.name, name) for name in here.statements]
                continue
            name, rest = parts[0], parts[1:]
            bindings = list(here.imports.get(name, []))
            if here is module and parts == chain:
                bindings += local_imports.get(name, [])
            found = bool(bindings)
            for source, symbol in bindings:
                meanings.add(f"{chain[0]} = {source}:{symbol or ''}")
                target = self.module(source)
                following = (symbol, *rest) if symbol else rest
                if target is here and following == parts:  # `from . import name`: the submodule
                    pending += self._elsewhere(here, parts, reached)
                elif target is not None:
                    pending.append((target, following))
            for owner in self._owners(here, name):
                found = True
                reached.append((here.name, owner))
            if not found:
                pending += self._elsewhere(here, parts, reached)
        return reached, meanings

    def enter(self, binding: Binding, pending: list[tuple[str, str]]) -> None:
        """Add what runs when a module is imported, with its packages and everything that it imports in turn."""
        imported = [binding]
        while imported:
            source, symbol = imported.pop()
            full = f"{source}.{symbol}" if symbol else source
            parts = full.split(".")
            for name in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
                module = self.module(name) if name not in self.entered else None
                if module is None:
                    continue
                self.entered.add(name)
                if MODULE_LEVEL in module.statements:
                    pending.append((name, MODULE_LEVEL))
                made = [*module.decorators, *(owner for owner in module.called if owner not in module.decorators)]
                pending += [(name, owner) for owner in made if self._is_registered(module, owner)]
                imported += module.imported

    def _is_registered(self, module: SourceModule, name: str) -> bool:
        """Whether the project's own code sees the symbol when it is made, or its making changes a table of another
        module: a decorator, a method of a table, a base class or metaclass that registers its subclasses.
        """
        if any(self.resolve(module, chain, {})[0] for chain in module.decorators.get(name, ())):
            return True
        called = [place for chain in module.called.get(name, ()) for place in self.resolve(module, chain, {})[0]]
        return any(is_mutable(self._statements(place)) for place in called) or self._has_subclass_hook(module, name)

    def _has_subclass_hook(self, module: SourceModule, name: str) -> bool:
        """Whether a class has a metaclass of the project, or an ancestor with `__init_subclass__`."""
        pending = [(module.name, name)]
        seen = set()
        while pending:
            place = pending.pop()
            classes = [statement for statement in self._statements(place) if isinstance(statement, ast.ClassDef)]
            if place in seen:
                continue
            seen.add(place)
            here = self.module(place[0])
            assert here is not None
            for statement in classes:
                if place != (module.name, name) and any(
                    isinstance(member, ast.FunctionDef) and member.name == "__init_subclass__"
                    for member in statement.body
                ):
                    return True
                if self._project_symbols(
                    here, [keyword.value for keyword in statement.keywords if keyword.arg == "metaclass"]
                ):
                    return True
                pending += self._project_symbols(here, statement.bases)
        return False

    def subclasses(self, hashes: Mapping[str, str]) -> list[tuple[str, str]]:
        """The classes of all modules that were entered whose base is in `hashes`, and which are not."""
        found = []
        for name in sorted(self.entered):
            module = self.module(name)
            assert module is not None
            for owner in module.decorators:
                bases = [
                    base for node in module.statements[owner] if isinstance(node, ast.ClassDef) for base in node.bases
                ]
                reached = {f"{source}:{symbol}" for source, symbol in self._project_symbols(module, bases)}
                if f"{name}:{owner}" not in hashes and not reached.isdisjoint(hashes):
                    found.append((name, owner))
        return found

    def _project_symbols(self, module: SourceModule, values: Sequence[ast.expr]) -> list[tuple[str, str]]:
        """The symbols of the project among these values."""
        chains = [chain for value in values for chain in used_names(value)[0]]
        return [place for chain in chains for place in self.resolve(module, chain, {})[0]]

    def _statements(self, place: tuple[str, str]) -> list[ast.stmt]:
        module = self.module(place[0])
        assert module is not None
        return module.statements[place[1]]

    @staticmethod
    def _owners(module: SourceModule, name: str) -> list[str]:
        owners = [name] if name in module.statements else []
        return [*owners, MODULE_LEVEL] if name in module.names_in_blocks else owners

    def _elsewhere(
        self, module: SourceModule, parts: Chain, reached: list[tuple[str, str]]
    ) -> list[tuple[SourceModule, Chain]]:
        """Where a name may come from that the module does not write itself: star imports, submodules, __getattr__."""
        stars = [self.module(star) for star in module.stars]
        submodule = self.module(f"{module.name}.{parts[0]}") if module.is_package else None
        if "__getattr__" in module.statements:
            reached.append((module.name, "__getattr__"))
        places = [(star, parts) for star in stars if star is not None]
        return [*places, (submodule, parts[1:])] if submodule is not None else places

    def _find(self, name: str) -> SourceModule | None:
        package, _, last = name.rpartition(".")
        if not name or name.partition(".")[0] in FRAMEWORK or name in sys.builtin_module_names:
            return None
        if package:
            self.module(package)
        folders = self.folders.get(package, []) if package else self.roots
        portions = []
        for place, folder in enumerate(folders):
            if not package and is_standard(str(folder)) and name in sys.stdlib_module_names:
                return None
            if not package and _is_foreign(name, folder):
                continue
            inside = folder / last
            is_folder = self._kind(inside) == "folder"
            for path in (*([inside / "__init__.py"] if is_folder else []), folder / f"{last}.py"):
                if self._kind(path) == "file":
                    if not package and self._is_installed(name, folders[:place]):
                        return None
                    if path.name == "__init__.py":
                        self.folders[name] = [inside]
                    module = read_module(name, path)
                    self.read[path] = module.sha256
                    return module
            if is_folder:
                portions.append(inside)
        if not portions or (not package and self._is_installed(name, folders)):
            return None
        self.folders[name] = portions  # a package without __init__ is all folders of its name together
        return read_module(name, None)

    def _is_installed(self, name: str, folders: Sequence[Path]) -> bool:
        """Whether an installed module has the name; looked up only where the project has one too."""
        foreign = [folder for folder in folders if _is_foreign(name, folder)]
        for folder in foreign:
            for path in places_of(name, folder):
                if self._kind(path) == "file":
                    return True
        return False

    def _kind(self, path: Path) -> Kind:
        self.looked_for[path] = kind_of(path)
        return self.looked_for[path]


def _is_foreign(name: str, folder: Path) -> bool:
    """Whether what a root has of that name is the standard library's or an installed package."""
    is_installed = not INSTALLED.isdisjoint(folder.parts)
    return is_standard(str(folder)) or (is_installed and name not in OWN_PACKAGES)
