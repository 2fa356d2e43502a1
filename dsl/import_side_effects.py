"""What a statement of a module changes when the module is imported, beside the names that it binds.

Followed: items and attributes that are set (`TABLE["x"] = 1`), methods that are called (`_ = TABLE.append(1)`, as a
default argument or in the body of a class too), other names of the same object (`OTHER = TABLE`), `global` in the body
of a class. A call of a plain function or of a class's method, `X = make(TABLE)`, is assumed to have no side
effects.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from dsl.syntax import Chain, bound_names, chain_of

Assignment = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Effect = tuple[set[str], ast.stmt, set[str], set[Chain]]  # names made, statement, names changed, methods called

ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete)
OTHER = ""  # what is changed is no name
_NEVER_CHANGE = frozenset({"frozenset", "tuple", "str", "bytes", "int", "float", "bool"})


def changed_names(statement: Assignment) -> set[str]:
    """Names of objects that the statement changes in place: TABLE in `TABLE["x"] = 1` and `TABLE += [1]`."""
    changed = set()
    pending: list[ast.AST] = list(_targets(statement))
    while pending:
        target = pending.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            pending += target.elts
        elif isinstance(target, (ast.Starred, ast.Attribute, ast.Subscript)):
            pending.append(target.value)
        elif isinstance(target, ast.Name):
            changed.add(target.id)
        else:
            changed.add(OTHER)
    return changed if isinstance(statement, ast.AugAssign) else changed - bound_names([statement])


def changed_in_body(definition: Definition) -> set[str]:
    """The same for all statements in the body of a class, but for names that the body binds itself."""
    if not isinstance(definition, ast.ClassDef):
        return set()
    changed = {
        name for node in _run_when_imported(definition) if isinstance(node, ASSIGNMENTS) for name in changed_names(node)
    }
    return changed - bound_names(definition.body) - {OTHER}


def globals_of(definition: Definition) -> set[str]:
    """Names that the body of a class declares global."""
    if not isinstance(definition, ast.ClassDef):
        return set()
    return {name for member in definition.body if isinstance(member, ast.Global) for name in member.names}


def calls_when_imported(statement: ast.stmt) -> set[Chain]:
    """The methods that a statement calls on names when the module is imported: ("TABLE", "append")."""
    chains = {chain_of(node.func) for node in _run_when_imported(statement) if isinstance(node, ast.Call)}
    return {chain for chain in chains if len(chain) > 1}


def aliases_among(statements: Mapping[str, Sequence[ast.stmt]]) -> dict[str, set[str]]:
    """For each global that shares its object with others, by `A = B` or `A = B = ...`, all names of that object."""
    groups: dict[str, set[str]] = {}
    for name, group in statements.items():
        for statement in group:
            if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or name not in bound_names([statement]):
                continue
            same = {target.id for target in _targets(statement) if isinstance(target, ast.Name)}
            same |= set(chain_of(statement.value)[:1]) if statement.value is not None else set()
            if len(same) < 2:
                continue
            together = same.union(*(groups.get(member, set()) for member in same))
            groups.update(dict.fromkeys(together, together))
    return groups


def is_mutable(statements: Sequence[ast.stmt]) -> bool:
    """Whether a method can change the object that these statements assign to a global: no function, no number."""
    assigned = [node.value for node in statements if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))]
    return any(value is not None and not _never_changes(value) for value in assigned)


def _never_changes(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return chain_of(value.func)[-1:] in {(name,) for name in _NEVER_CHANGE}
    return isinstance(value, (ast.Constant, ast.Tuple, ast.JoinedStr, ast.UnaryOp, ast.Compare, ast.Lambda))


def _targets(statement: Assignment) -> list[ast.expr]:
    return statement.targets if isinstance(statement, (ast.Assign, ast.Delete)) else [statement.target]


def _run_when_imported(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement, but for the bodies of functions, and for decorators, which are looked at elsewhere."""
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending += [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]
        elif node is statement and isinstance(node, ast.ClassDef):
            pending += [*node.bases, *node.keywords, *node.body]
        else:
            pending += ast.iter_child_nodes(node)
