"""What enters a node's key: its config, and the code that its run function reaches."""

from __future__ import annotations

import hashlib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from dsl.encoding import encode, fingerprint
from dsl.errors import ConfigError
from dsl.graph import GraphNode
from dsl.secrets import without_secrets
from dsl.source import MODULE_LEVEL, Binding, SourceModule, read_module
from dsl.syntax import Chain

__all__ = ["ReadCode", "code_fingerprints", "encode", "fingerprint", "key_config", "kind_of", "read_code"]

FRAMEWORK = frozenset({"dsl", "executor"})  # never part of a node's code
INSTALLED = frozenset({"site-packages", "dist-packages"})
OWN_PACKAGES = frozenset({"ops", "pipelines"})  # what is the project's own in a folder of installed packages


Kind = Literal["file", "folder", ""]  # of what a path leads to; "" where there is neither


@frozen
class ReadCode:
    """The code that a run function reaches: a hash by "module:symbol", and all that the hashes depend on.

    read: the source files. looked_for: what stood at each other path where a module might have been. `text` gives
    the source of a symbol.
    """

    hashes: dict[str, str]
    read: frozenset[Path]
    looked_for: dict[Path, Kind]
    modules: Mapping[str, SourceModule | None]

    def text(self, place: str) -> str:
        """The lines of "module:symbol" as they are written, decorators included."""
        module_name, _, name = place.partition(":")
        module = self.modules[module_name]
        return module.text_of(name) if module is not None else ""


def key_config(node: GraphNode) -> dict[str, object]:
    """The config as it enters the key: without neutral fields, edges and external paths.

    Edges and external paths enter by the digest of their content. An external field that names something built in,
    or a model id, enters by that name.
    """
    config = {}
    for field in node.op.fields.values():
        value = getattr(node.config, field.name)
        if field.neutral or (field.external and isinstance(value, str) and Path(value).is_absolute()):
            continue
        config[field.name] = _widened(without_secrets(value), field.type)
    return config


def code_fingerprints(run: str, roots: Sequence[Path]) -> dict[str, str]:
    """The hashes of `read_code`."""
    return read_code(run, roots).hashes


def read_code(run: str, roots: Sequence[Path]) -> ReadCode:
    """ "module:symbol" -> hash, for the run function "module:function" and every symbol of the project it reaches.

    The project is the source files under the roots, the first root first. Nothing is imported: names and attributes
    of modules are followed statically, through imports and re-exports; what is found at run time only (getattr with a
    computed name, importlib) is not seen. "module:<module>" stands for the statements with side effects of a module
    that is imported on the way. A symbol's hash covers its syntax tree and what the imported names in it mean.
    Raises ConfigError where the run function is not there.
    """
    project = _Project(roots)
    module_name, _, function = run.partition(":")
    module = project.module(module_name)
    if module is None:
        raise ConfigError(f'run = "{run}": there is no module {module_name} under {", ".join(map(str, roots))}')
    pending, _meanings = project.resolve(module, (function,), {})
    if not pending:
        raise ConfigError(f'run = "{run}": the module {module_name} has no function {function}')
    project.enter((module_name, None), pending)
    hashes: dict[str, str] = {}
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
        for binding in [(module_name, None), *symbol.imported]:
            project.enter(binding, pending)
        hashes[place] = hashlib.sha256(symbol.encoded + encode(sorted(meanings))).hexdigest()
    return ReadCode(dict(sorted(hashes.items())), frozenset(project.read), project.looked_for, project.modules)


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
        self.entered: set[str] = set()
        self.read: set[Path] = set()
        self.looked_for: dict[Path, Kind] = {}

    def module(self, name: str) -> SourceModule | None:
        if name not in self.modules:
            self.modules[name] = self._find(name)
        return self.modules[name]

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
                pending += [(name, owner) for owner in module.decorators if self._is_registered(module, owner)]
                imported += module.imported

    def _is_registered(self, module: SourceModule, name: str) -> bool:
        """Whether the project's own code sees the symbol when it is made: a decorator that may put it into a table."""
        return any(self.resolve(module, chain, {})[0] for chain in module.decorators[name])

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
        parts = name.split(".")
        if parts[0] in FRAMEWORK or not name:
            return None
        package = self.module(".".join(parts[:-1])) if len(parts) > 1 else None
        if len(parts) > 1 and (package is None or not package.is_package):
            return None
        for root in self.roots:
            if root.name in INSTALLED and parts[0] not in OWN_PACKAGES:
                continue
            folder = root.joinpath(*parts)
            is_folder = self._kind(folder) == "folder"
            places = [folder / "__init__.py"] if is_folder else []
            for path in (*places, folder.with_name(f"{parts[-1]}.py")):
                if self._kind(path) == "file":
                    self.read.add(path)
                    return read_module(name, path)
            if is_folder:
                return read_module(name, None)
        return None

    def _kind(self, path: Path) -> Kind:
        self.looked_for[path] = kind_of(path)
        return self.looked_for[path]


def _widened(value: Any, expected: Any) -> Any:
    """An int where the field is a float becomes one, so that `lr = 1` and `lr = 1.0` are the same key."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin is tuple and isinstance(value, (tuple, list)):
        return tuple(_widened(member, arguments[0]) for member in value)
    if origin is dict and isinstance(value, dict):
        return {key: _widened(member, arguments[1]) for key, member in value.items()}
    members = arguments if origin in (typing.Union, types.UnionType) else (expected,)
    if type(value) is int and float in members and int not in members:
        return float(value)
    return value
