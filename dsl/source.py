"""One source file of the project as code fingerprints see it: symbols, imports, and what runs when it is imported."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

from attrs import define, frozen

from dsl.errors import ConfigError
from dsl.syntax import Chain, bound_names, encode_tree, is_docstring, used_names

MODULE_LEVEL = "<module>"  # the symbol that holds the statements with side effects

Binding = tuple[str, str | None]  # (module, name in it); (module, None) is the module itself


@frozen
class Symbol:
    """All statements of a module that make one global: its tree, and what it uses from outside."""

    encoded: bytes
    uses: frozenset[Chain]
    imports: dict[str, list[Binding]]  # imports inside functions
    imported: frozenset[Binding]


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
    decorators: dict[str, set[Chain]]
    symbols: dict[str, Symbol]
    lines: list[str]

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
        for statement in self.statements[name]:
            for tree in _what_counts(statement, self):
                encoded.append(encode_tree(tree))
                chains, local_imports = used_names(tree)
                uses |= chains
                for local_import in local_imports:
                    _bind(local_import, self.name, self.is_package, imports, [], imported)
        return Symbol(b"".join(encoded), frozenset(uses), imports, frozenset(imported))


def read_module(name: str, path: Path | None) -> SourceModule:
    """The module in a file, parsed once for the same content; a path of None is a folder without `__init__.py`.

    Raises ConfigError for a file that is not Python.
    """
    if path is None:
        return SourceModule(name, True, {}, set(), {}, [], set(), {}, {}, [])
    return _parse(name, path, path.read_bytes())


@lru_cache(maxsize=4096)
def _parse(name: str, path: Path, source: bytes) -> SourceModule:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is not Python: {error}") from error
    lines = source.decode("utf-8", "replace").split("\n")
    module = SourceModule(name, path.name == "__init__.py", {}, set(), {}, [], set(), {}, {}, lines)
    changes: list[tuple[str, ast.stmt]] = []
    for statement in tree.body:
        _index(statement, module, changes)
    for global_name, statement in changes:
        owner = global_name if global_name in module.statements else MODULE_LEVEL
        module.statements.setdefault(owner, []).append(statement)
    for statements in module.statements.values():
        statements.sort(key=lambda statement: (statement.lineno, statement.col_offset))
    return module


def _index(statement: ast.stmt, module: SourceModule, changes: list[tuple[str, ast.stmt]]) -> None:
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        _bind(statement, module.name, module.is_package, module.imports, module.stars, module.imported)
    elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        module.statements.setdefault(statement.name, []).append(statement)
        chains = [used_names(decorator)[0] for decorator in statement.decorator_list]
        module.decorators.setdefault(statement.name, set()).update(*chains)
    elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete)):
        names = bound_names([statement])
        for name in names:
            module.statements.setdefault(name, []).append(statement)
        changes += [(name, statement) for name in _changed_names(statement) - names]
    elif isinstance(statement, ast.If) and _is_name(statement.test, "TYPE_CHECKING"):
        _bind_all(statement, module)
    elif not isinstance(statement, ast.Pass) and not is_docstring(statement) and not _is_main_block(statement):
        module.statements.setdefault(MODULE_LEVEL, []).append(statement)
        module.names_in_blocks |= bound_names([statement])
        _bind_all(statement, module)


def _changed_names(statement: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete) -> set[str]:
    """Globals whose items or attributes the statement sets: TABLE in `TABLE["x"] = 1`."""
    targets = statement.targets if isinstance(statement, (ast.Assign, ast.Delete)) else [statement.target]
    changed = set()
    pending: list[ast.AST] = list(targets)
    while pending:
        target = pending.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            pending += target.elts
        elif isinstance(target, (ast.Starred, ast.Attribute, ast.Subscript)):
            pending.append(target.value)
        elif isinstance(target, ast.Name):
            changed.add(target.id)
        else:
            changed.add(MODULE_LEVEL)
    return changed


def _bind_all(statement: ast.stmt, module: SourceModule) -> None:
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
    """The statement; of the config class of an op only its bases and methods.

    The fields' values are in the key by themselves, so that a better help text does not train anew.
    """
    if not isinstance(statement, ast.ClassDef) or ("op",) not in module.decorators.get(statement.name, ()):
        return [statement]
    if ("dsl.op", "op") not in module.imports.get("op", []):
        return [statement]
    methods = [member for member in statement.body if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [*statement.bases, *methods]


def _is_name(node: ast.expr, name: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)


def _is_main_block(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.If)
        and isinstance(statement.test, ast.Compare)
        and _is_name(statement.test.left, "__name__")
    )
