"""Every place in ops/ that refuses something is in refusals.txt, with why plan does or cannot refuse it.

A row is `function | start of the message | verdict | where or why`, below the name of its file. Verdicts:

plan     depends on configs, files that exist and what other nodes promise, and is refused before anything runs: the
         test that shows it
late     depends on configs and files that exist, yet only the stage refuses it: what it is, and when
config   raised while the config of a node is made, so before a plan
edge     depends on what of another node's output is not promised before it is there, or not shown to be refused before
data     depends on rows, tensors or computed values, which only the stage has
process  depends on a library, a server or the machine at the time
damage   an artifact, or a file of the store, is not as it was written
tool     of a command that is no node's
caller   a wrong call in dflow's or the user's own code

A row that is missing is printed by the failing test as it has to be added.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("refusals.txt")
ERRORS = {"DataError", "ConfigError"}
VERDICTS = {"plan", "late", "config", "edge", "data", "process", "damage", "tool", "caller"}
LENGTH = 48  # characters of a message
Place = tuple[str, str, str]  # file, function, start of the message


def places() -> Counter[Place]:
    trees = {
        file.relative_to(ROOT).as_posix(): ast.parse(file.read_text()) for file in sorted(ROOT.glob("ops/**/*.py"))
    }
    errors = ERRORS | {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(_name(base) in ERRORS for base in node.bases)
    }
    return Counter(
        (file, function, start) for file, tree in trees.items() for function, start in _raised(tree, errors, ())
    )


def _raised(node: ast.AST, errors: set[str], scope: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(Function, start of the message) of every error that is made below the node."""
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*scope, child.name)
        if isinstance(child, ast.Call) and _name(child.func) in errors:
            yield ".".join(scope), _start(child.args[0]) if child.args else ""
        yield from _raised(child, errors, inner)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _start(message: ast.expr) -> str:
    """The words of the message; {} in place of a value, and the expression where there are no words."""
    if isinstance(message, ast.Constant):
        text = str(message.value)
    elif isinstance(message, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in message.values)
    else:
        text = f"<{ast.unparse(message)}>"
    return " ".join(text.replace("|", "/").split())[:LENGTH].strip()


def rows() -> list[tuple[Place, str, str]]:
    """(Place, verdict, where or why) of the table."""
    found, file = [], ""
    for line in TABLE.read_text().splitlines():
        if not line.startswith(" "):
            file = line
            continue
        function, start, verdict, why = (part.strip() for part in line.split(" | "))
        found.append(((file, function, start), verdict, why))
    return found


def as_rows(missing: Counter[Place]) -> str:
    return "\n".join(f"{file}\n    {function} | {start} | ? | ?" for file, function, start in missing.elements())


def test_every_refusal_has_a_row_and_every_row_a_refusal() -> None:
    in_code, in_table = places(), Counter(place for place, _, _ in rows())
    missing, gone = as_rows(in_code - in_table), as_rows(in_table - in_code)
    assert not missing, f"add to {TABLE.name}, with a verdict:\n{missing}"
    assert not gone, f"remove from {TABLE.name}:\n{gone}"


def test_every_row_has_a_verdict_and_a_reason_and_what_plan_refuses_a_test() -> None:
    wrong = [place for place, verdict, why in rows() if verdict not in VERDICTS or not why]
    assert [] == wrong
    untested = []
    for place, verdict, why in rows():
        file, _, name = why.partition("::")
        if verdict == "plan" and f"def {name}(" not in (ROOT / "tests" / file).read_text():
            untested.append((place, why))
    assert [] == untested
