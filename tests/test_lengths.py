"""Functions of at most 60 lines, files of at most 400: what is longer does two things."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_OF_A_FUNCTION, MOST_OF_A_FILE = 60, 400
MISTAKEN = ROOT / "tests" / "dsl" / "mistakes"  # pipelines with mistakes, those of syntax too
FILES = [
    file
    for folder in ("dsl", "executor", "ops", "benchmarks", "tests")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if not file.is_relative_to(MISTAKEN)
]


def test_no_file_is_longer_than_it_may_be():
    lengths = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    assert len(lengths) > 100
    assert {} == {name: lines for name, lines in lengths.items() if lines > MOST_OF_A_FILE}


def test_no_function_is_longer_than_it_may_be():
    lengths = {
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}": _lines(node)
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {} == {name: lines for name, lines in lengths.items() if lines > MOST_OF_A_FUNCTION}


@pytest.mark.parametrize(("statements", "expected"), [(59, 60), (60, 61)])
def test_a_function_is_counted_with_its_head_and_without_its_decorators(statements, expected):
    function = ast.parse("@decorator\ndef function():\n" + "    pass\n" * statements).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert expected == _lines(function)


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1
