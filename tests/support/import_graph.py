"""Which files of the repository import which, read from their syntax trees. Loads nothing of them."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
SUPPORTS = (SUPPORT, *(SUPPORT / room for room in ("data", "drafts", "toys", "training")))
FOLDERS = (ROOT, ROOT / "tests", *SUPPORTS)  # where a name is looked for
PYTHON_PATH = os.pathsep.join(map(str, (ROOT, *SUPPORTS)))  # of processes that tests start


def module_name(path: Path) -> str:
    """The module name of a path: `ops/lib/data/files.py` becomes `ops.lib.data.files`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported(path: Path, *, in_functions: bool = True) -> tuple[str, ...]:
    """The full names that a file imports; `from a import b` counts as a.b, a module or a name in one."""
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    names: list[str] = []
    for node in _nodes(ast.parse(path.read_bytes()), in_functions):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{source}.{alias.name}" for alias in node.names]
    return tuple(names)


@cache
def files_of(name: str) -> tuple[Path, ...]:
    """The files of the repository that importing a full name loads: packages on the way, and the module."""
    parts = name.split(".")
    places = [folder.joinpath(*parts[:count]) for count in range(1, len(parts) + 1) for folder in FOLDERS]
    return tuple(
        path for place in places for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()
    )


def reached(start: Path, *, in_functions: bool = True) -> set[str]:
    """The names that importing a file imports, each with its prefixes, followed through the repository's files."""
    found: set[str] = set()
    seen: set[Path] = set()
    pending = [start]
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in imported(path, in_functions=in_functions):
            parts = name.split(".")
            found |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
            pending += files_of(name)
    return found


def _nodes(node: ast.AST, in_functions: bool) -> Iterator[ast.AST]:
    yield node
    if in_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        for child in ast.iter_child_nodes(node):
            yield from _nodes(child, in_functions)
