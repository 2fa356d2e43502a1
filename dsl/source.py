"""One source file of the project as code fingerprints see it: symbols, imports, and what runs when it is imported."""

from __future__ import annotations

import ast
import copy
import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeGuard

from attrs import define, frozen

from dsl.errors import ConfigError
from dsl.import_side_effects import (
    ASSIGNMENTS,
    Effect,
    aliases_among,
    calls_when_imported,
    changed_in_body,
    changed_names,
    globals_of,
    is_mutable,
)
from dsl.op_class import OUTSIDE_KEY, REQUIRED_FILES
from dsl.syntax import Chain, bound_names, chain_of, data_files, encode_tree, is_docstring, used_names

_ANNOTATION = re.compile(rb" (annotation|returns)[ )]")  # as encode_tree names these fields
MODULE_LEVEL = "<module>"  # the symbol that holds the statements with side effects

Binding = tuple[str, str | None]  # (module, name in it); (module, None) is the module itself
DataFile = tuple[str, str]  # (package, file in its folder)


@frozen
class Symbol:
    """All statements of a module that make one global: its tree, and what it uses from outside."""

    encoded: bytes
    uses: frozenset[Chain]
    imports: dict[str, list[Binding]]  # imports inside functions
    imported: frozenset[Binding]
    data: frozenset[DataFile]  # what `pkgutil.get_data` reads


@define
class SourceModule:
    """A parsed module. `statements` maps every global, and MODULE_LEVEL, to the statements that make or change it."""

    name: str
    is_package: bool
    statements: dict[str, list[ast.stmt]]
    names_in_blocks: set[str]
    imports: dict[str, list[Binding]]
    stars: list[str]
    imported: set[Binding]
    decorators: dict[str, set[Chain]]  # of every function and class
    called: dict[str, set[Chain]]  # `table.add` of an imported name, called while the module is imported
    symbols: dict[str, Symbol]
    lines: list[str]
    sha256: str = ""  # of the file's bytes

    def text_of(self, name: str) -> str:
        """The source lines of all statements that make or change a global."""
        written = []
        for statement in self.statements.get(name, []):
            decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
            start = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
            written += self.lines[start - 1 : statement.end_lineno]
        return "".join(f"{line.rstrip()}\n" for line in written)

    def symbol(self, name: str) -> Symbol:
        """The symbol, worked out once."""
        if name not in self.symbols:
            self.symbols[name] = self._read_symbol(name)
        return self.symbols[name]

    def _read_symbol(self, name: str) -> Symbol:
        encoded = []
        uses: set[Chain] = set()
        imports: dict[str, list[Binding]] = {}
        imported: set[Binding] = set()
        data: set[DataFile] = set()
        for statement in self.statements[name]:
            for tree in _what_counts(statement, self):
                encoded.append(encode_tree(tree))
                data |= data_files(tree) if b"get_data" in encoded[-1] else set()
                chains, local_imports = used_names(tree)
                uses |= chains
                for local_import in local_imports:
                    _bind(local_import, self.name, self.is_package, imports, [], imported)
        if ("__future__", "annotations") in self.imports.get("annotations", []):
            encoded += [b"text" for tree in encoded if _ANNOTATION.search(tree)]  # annotations are no values
        return Symbol(b"".join(encoded), frozenset(uses), imports, frozenset(imported), frozenset(data))


def read_module(name: str, path: Path | None) -> SourceModule:
    """The module in a file, parsed once for the same content; a path of None is a folder without `__init__.py`.

    Raises ConfigError for a file that is not Python.
    """
    if path is None:
        return SourceModule(name, True, {}, set(), {}, [], set(), {}, {}, {}, [])
    return _parse(name, path, path.read_bytes())


@lru_cache(maxsize=4096)
def _parse(name: str, path: Path, source: bytes) -> SourceModule:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is not Python: {error}") from error
    lines = source.decode("utf-8", "replace").split("\n")
    module = SourceModule(name, path.name == "__init__.py", {}, set(), {}, [], set(), {}, {}, {}, lines)
    module.sha256 = hashlib.sha256(source).hexdigest()
    effects: list[Effect] = []
    for statement in tree.body:
        _index(statement, module, effects)
    _place(effects, module)
    return module


def _place(effects: Sequence[Effect], module: SourceModule) -> None:
    """Put each statement to the globals that it changes beside those that it makes."""
    aliases = aliases_among(module.statements)
    tables = {name for name, statements in module.statements.items() if is_mutable(statements)}
    for makes, statement, changed, calls in effects:
        touched = changed | {chain[0] for chain in calls} & tables
        for table in {alias for name in touched for alias in aliases.get(name, {name})}:
            placed = module.statements.setdefault(table if table in module.statements else MODULE_LEVEL, [])
            if statement not in placed:
                placed.append(statement)
        elsewhere = {chain for chain in calls if chain[0] in module.imports}
        for name in makes if elsewhere else ():
            module.called.setdefault(name, set()).update(elsewhere)
    for statements in module.statements.values():
        statements.sort(key=lambda statement: (statement.lineno, statement.col_offset))


def _index(statement: ast.stmt, module: SourceModule, effects: list[Effect]) -> None:
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        _bind(statement, module.name, module.is_package, module.imports, module.stars, module.imported)
    elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        names = {statement.name, *globals_of(statement)}
        _make(names, statement, module)
        chains = [used_names(decorator)[0] for decorator in statement.decorator_list]
        module.decorators.setdefault(statement.name, set()).update(*chains)
        effects.append((names, statement, changed_in_body(statement) - names, calls_when_imported(statement)))
    elif isinstance(statement, ASSIGNMENTS):
        names = bound_names([statement])
        _make(names, statement, module)
        effects.append((names, statement, changed_names(statement), calls_when_imported(statement)))
    elif isinstance(statement, ast.If) and _is_name(statement.test, "TYPE_CHECKING"):
        _bind_all(statement.body, module)
        for inner in statement.orelse:
            _index(inner, module, effects)
    elif _is_main_block(statement):
        for inner in statement.orelse:
            _index(inner, module, effects)
    elif not isinstance(statement, ast.Pass) and not is_docstring(statement):
        module.statements.setdefault(MODULE_LEVEL, []).append(statement)
        module.names_in_blocks |= bound_names([statement])
        _bind_all([statement], module)


def _make(names: Iterable[str], statement: ast.stmt, module: SourceModule) -> None:
    for name in names:
        module.statements.setdefault(name, []).append(statement)


def _bind_all(statements: Iterable[ast.stmt], module: SourceModule) -> None:
    for statement in statements:
        for inner in used_names(statement)[1]:
            _bind(inner, module.name, module.is_package, module.imports, module.stars, module.imported)


def _bind(
    statement: ast.Import | ast.ImportFrom,
    module: str,
    is_package: bool,
    imports: dict[str, list[Binding]],
    stars: list[str],
    imported: set[Binding],
) -> None:
    """Note what an import statement binds, and what it runs."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            imported.add((alias.name, None))
            top = alias.name.partition(".")[0]
            imports.setdefault(alias.asname or top, []).append((alias.name if alias.asname else top, None))
        return
    source = statement.module or ""
    if statement.level:
        parts = module.split(".")
        package = parts[: len(parts) - statement.level + is_package]
        source = ".".join([*package, source] if source else package)
    for alias in statement.names:
        if alias.name == "*":
            stars.append(source)
            imported.add((source, None))
        else:
            imports.setdefault(alias.asname or alias.name, []).append((source, alias.name))
            imported.add((source, alias.name))


def _what_counts(statement: ast.stmt, module: SourceModule) -> list[ast.AST]:
    """The statement; of the config class of an op all but the `@op`, its fields, class attributes and hooks; of a table
    of one all but what its fields have beside their defaults; of an artifact type all but its `required_files`.

    The fields' values are in the key by themselves, so that a better help text does not train anew. Defaults of a
    table count, since other code may make one.
    """
    if not isinstance(statement, ast.ClassDef):
        return [statement]
    if any("dsl.op.Artifact" in _meanings(chain_of(base), module) for base in statement.bases):
        artifact = copy.copy(statement)
        artifact.body = [member for member in statement.body if bound_names([member]) != {REQUIRED_FILES}]
        return [artifact]
    body = [member for member in statement.body if not is_docstring(member)]
    others = [decorator for decorator in statement.decorator_list if not _is("dsl.op.op", decorator, module)]
    if len(others) < len(statement.decorator_list):
        body = [member for member in body if not _is_outside_key(member, module)]
        return [*others, *statement.bases, *statement.keywords, *body]
    bare = [_with_default_only(member, module) for member in body]
    if bare != body:
        return [*others, *statement.bases, *statement.keywords, *bare]
    return [statement]


def _with_default_only(member: ast.stmt, module: SourceModule) -> ast.stmt:
    """A field that `dsl.op.field` declares, without its help, bounds and rules; any other statement as it is."""
    if not (isinstance(member, ast.AnnAssign) and isinstance(member.value, ast.Call)):
        return member
    if not _is("dsl.op.field", member.value, module):
        return member
    bare = copy.copy(member)
    bare.value = next((each.value for each in member.value.keywords if each.arg == "default"), None)
    return bare


def _is(name: str, expression: ast.expr, module: SourceModule) -> bool:
    """Whether it is what has that full name, or a call of it."""
    chain = chain_of(expression.func if isinstance(expression, ast.Call) else expression)
    return name in _meanings(chain, module)


def _is_outside_key(member: ast.stmt, module: SourceModule) -> bool:
    names = bound_names([member])
    return _is_field(member, module) or (bool(names) and names <= OUTSIDE_KEY)


def _is_field(member: ast.stmt, module: SourceModule) -> bool:
    """Whether a statement of a class declares a field: it has an annotation, and that is no ClassVar."""
    if not isinstance(member, ast.AnnAssign):
        return False
    annotation: ast.AST = member.annotation
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return "ClassVar" not in annotation.value
    meanings = {meaning for chain in used_names(annotation)[0] for meaning in _meanings(chain, module)}
    return not any(meaning.endswith(".ClassVar") for meaning in meanings)


def _meanings(chain: Chain, module: SourceModule) -> set[str]:
    """The full names that a chain may stand for by the module's imports."""
    bindings = module.imports.get(chain[0], []) if chain else []
    return {".".join([source, *([symbol] if symbol else []), *chain[1:]]) for source, symbol in bindings}


def _is_name(node: ast.expr, name: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)


def _is_main_block(statement: ast.stmt) -> TypeGuard[ast.If]:
    """Whether it is `if __name__ == "__main__":`, whose body no import runs."""
    if not isinstance(statement, ast.If) or not isinstance(statement.test, ast.Compare):
        return False
    sides = {ast.unparse(side) for side in (statement.test.left, *statement.test.comparators)}
    return isinstance(statement.test.ops[0], ast.Eq) and sides == {"__name__", "'__main__'"}
