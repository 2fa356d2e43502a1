"""An encoding of Python syntax trees of our own (`ast.dump` differs between Pythons), and the names that a tree uses.

Not encoded: positions, comments, formatting, docstrings, type comments, and every field that is empty or None, so
that a field which a later Python adds changes nothing. No function here recurses.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from dsl.encoding import encode

Chain = tuple[str, ...]  # `np.linalg.norm` is ("np", "linalg", "norm")

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp

_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SKIPPED = frozenset({"ctx", "type_comment", "type_ignores", "kind"})
_FIELDS: dict[type, list[str]] = {
    kind: [name for name in kind._fields if name not in _SKIPPED]
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}
_IMPORTERS = frozenset({"import_module", "__import__"})


def encode_tree(tree: ast.AST) -> bytes:
    """The canonical bytes of a syntax tree; equal exactly for code that says the same, word for word.

    A node is its class and the names of its fields that are there, followed by their values in the same order.
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


def is_docstring(statement: ast.stmt) -> bool:
    """Whether the statement is a bare string."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def used_names(tree: ast.AST) -> tuple[set[Chain], list[ast.Import | ast.ImportFrom]]:
    """Names that a statement takes from outside itself, each with its attributes, and the imports inside it.

    Parameters and local variables of functions, and the variables of comprehensions, are not taken from outside;
    names that a function imports are. `import_module("written.out")` is an import too, bound to a name of its own.
    """
    chains: set[Chain] = set()
    imports: list[ast.Import | ast.ImportFrom] = []
    pending: list[tuple[ast.AST, frozenset[str]]] = [(tree, frozenset())]
    while pending:
        node, hidden = pending.pop()
        if isinstance(node, (ast.Name, ast.Attribute)):
            chain = _chain(node)
            if chain and chain[0] not in hidden:
                chains.add(chain)
            if chain is None:
                pending += [(child, hidden) for child in _children(node)]
        elif isinstance(node, ast.Call) and (module := _named_module(node)):
            imports.append(ast.Import([ast.alias(module, f"import {module}")]))
            chains.add((f"import {module}",))
            pending += [(child, hidden) for child in _children(node)]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(node)
        elif isinstance(node, ast.Global):
            chains.update((name,) for name in node.names)
        elif isinstance(node, Function):
            pending += _function_parts(node, hidden)
        elif isinstance(node, Comprehension):
            first = node.generators[0]
            inside = hidden | _stored_names([generator.target for generator in node.generators])
            pending.append((first.iter, hidden))
            pending += [(child, inside) for child in _children(node) if child is not first]
            pending += [(child, inside) for child in (first.target, *first.ifs)]
        else:
            pending += [(child, hidden) for child in _children(node)]
    return chains, imports


def data_files(tree: ast.AST) -> set[tuple[str, str]]:
    """(package, file) of each `get_data("package", "file")` whose arguments are written out."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=called, args=[ast.Constant(str() as package), ast.Constant(str() as file)]) if chain_of(
                called
            )[-1:] == ("get_data",):
                found.add((package, file))
    return found


def bound_names(statements: Iterable[ast.AST]) -> set[str]:
    """Names that the statements bind in the scope they stand in; those that imports alone bind are left out."""
    return _bindings(statements)[0]


def chain_of(node: ast.expr) -> Chain:
    """The chain of a name that is read, with its attributes; empty for anything else."""
    return (_chain(node) if isinstance(node, (ast.Name, ast.Attribute)) else None) or ()


def _bindings(statements: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """The names that statements bind by anything but imports, and those that they bind by imports."""
    bound: set[str] = set()
    imported: set[str] = set()
    elsewhere: set[str] = set()
    pending: list[tuple[ast.AST, bool]] = [(statement, False) for statement in statements]
    while pending:
        node, in_comprehension = pending.pop()
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load) and not in_comprehension:
                bound.add(node.id)
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, _DOCUMENTED):
            bound.add(node.name)
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imported.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
            continue
        if isinstance(node, ast.NamedExpr):
            bound.add(node.target.id)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            bound.add(node.rest)
        elif isinstance(node, ast.Global):
            elsewhere.update(node.names)
        in_comprehension = in_comprehension or isinstance(node, Comprehension)
        pending += [(child, in_comprehension) for child in _children(node)]
    return bound - elsewhere, imported


def _named_module(call: ast.Call) -> str:
    """The module that a call imports by a name that is written out; empty for any other call."""
    if chain_of(call.func)[-1:] not in {(importer,) for importer in _IMPORTERS} or not call.args:
        return ""
    name = call.args[0]
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
        return ""
    return "" if name.value.startswith(".") else name.value


def _written_fields(node: ast.AST) -> tuple[tuple[str, ...], list[Any]]:
    """The names of the fields that count, and their values; not those that are empty."""
    names, values = [], []
    for name in _FIELDS[type(node)]:
        value = getattr(node, name, None)
        if isinstance(value, list):
            if name == "body" and isinstance(node, _DOCUMENTED) and is_docstring(value[0]):
                value = value[1:]
            elif isinstance(node, ast.JoinedStr):  # Python 3.12.0 ends some f-strings with an empty string
                value = [part for part in value if not _is_empty_string(part)]
            if not value:
                continue
        elif value is None:
            continue
        names.append(name)
        values.append(value)
    return tuple(names), values


@cache
def _header(kind: str, names: tuple[str, ...]) -> bytes:
    return f"({' '.join([kind, *names])})".encode()


def _children(node: ast.AST) -> list[ast.AST]:
    """What `ast.iter_child_nodes` yields, without contexts, faster."""
    children: list[ast.AST] = []
    for name in _FIELDS[type(node)]:
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            children.append(value)
        elif isinstance(value, list):
            children += [member for member in value if isinstance(member, ast.AST)]
    return children


def _is_empty_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == ""


def _chain(node: ast.Name | ast.Attribute) -> Chain | None:
    """The chain of a name that is read; empty for one that is written, None for attributes of something else."""
    parts = []
    base: ast.expr = node
    while isinstance(base, ast.Attribute):
        parts.append(base.attr)
        base = base.value
    if not isinstance(base, ast.Name):
        return None
    return (base.id, *reversed(parts)) if isinstance(base.ctx, ast.Load) else ()


def _function_parts(node: Function, hidden: frozenset[str]) -> list[tuple[ast.AST, frozenset[str]]]:
    """The parts of a function, each with the names that are hidden from the outside there."""
    arguments = node.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    parameters += [extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
    body: Sequence[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else node.body
    bound, imported = _bindings(body)
    own = {parameter.arg for parameter in parameters} | bound
    inside = (hidden | own) - imported  # `import fast as impl`, and `impl = None` where there is none
    parts: list[tuple[ast.AST, frozenset[str]]] = [(statement, inside) for statement in body]
    parts += [(child, hidden) for child in _children(node) if child not in body]
    return parts


def _stored_names(targets: Iterable[ast.AST]) -> set[str]:
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
