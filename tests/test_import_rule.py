"""The import rule, read from the syntax trees of the whole repository."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "dsl": {"dsl"},
    "ops": {"dsl", "ops"},
    "executor": {"dsl", "ops", "executor"},
    "pipelines": {"dsl", "ops", "pipelines"},
}
ROOMS = set(MAY_IMPORT)
HEAVY = {"torch", "transformers", "mlflow"}
FILES = [path for room in MAY_IMPORT for path in sorted((ROOT / room).rglob("*.py"))]
DECLARATIONS = [ROOT / "ops" / "__init__.py", ROOT / "ops" / "artifacts.py", *sorted((ROOT / "ops").glob("*/op.py"))]
DECLARATIONS += [*sorted((ROOT / "ops").glob("*/resources.py")), ROOT / "ops" / "unmet.py"]
DECLARATIONS += sorted((ROOT / "ops").glob("*/smoke.py"))
DECLARATIONS += sorted((ROOT / "ops").glob("*/report.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[str]:
    """Full names that a file imports, `from a import b` as a.b, which may be a module or a name in one."""
    tree = ast.parse(path.read_bytes())
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def reached(path: Path) -> set[str]:
    """Everything that importing a file imports, through the files of the repository."""
    found: set[str] = set()
    pending = [path]
    seen = set()
    while pending:
        here = pending.pop()
        if here in seen:
            continue
        seen.add(here)
        for name in imported(here):
            parts = name.split(".")
            for count in range(1, len(parts) + 1):
                found.add(".".join(parts[:count]))
                base = ROOT.joinpath(*parts[:count])
                pending += [file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()]
    return found


def test_a_room_imports_only_the_rooms_before_it() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in FILES
        for name in imported(path)
        if (top := name.split(".")[0]) in ROOMS and top not in MAY_IMPORT[path.relative_to(ROOT).parts[0]]
    ]
    assert wrong == []


def test_only_the_tracking_module_imports_mlflow() -> None:
    importing = {
        path.relative_to(ROOT).as_posix() for path in FILES if "mlflow" in {n.split(".")[0] for n in imported(path)}
    }
    assert importing <= {"executor/tracking/mlflow_client.py"}


def test_dsl_imports_nothing_heavy() -> None:
    dsl = [path for path in FILES if path.relative_to(ROOT).parts[0] == "dsl"]
    tops = {name.split(".")[0] for path in dsl for name in imported(path)}
    assert tops - sys.stdlib_module_names == {"attrs", "dsl", "tomli"}


@pytest.mark.parametrize("path", DECLARATIONS, ids=module_name)
def test_a_declaration_reaches_no_torch_and_no_run_module(path: Path) -> None:
    names = reached(path)
    assert HEAVY & names == set()
    assert {name for name in names if name.startswith("ops.") and name.split(".")[2:3] == ["run"]} == set()


def test_no_function_imports_anything() -> None:
    inside = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for function in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    assert inside == []


def test_reading_and_compiling_a_pipeline_loads_neither_torch_nor_mlflow() -> None:
    script = (
        "import sys; from pathlib import Path; import dsl.fingerprint; from dsl.op_table import all_ops\n"
        "from dsl.read_toml import read_graph\n"
        "all_ops(); read_graph(Path('pipelines/vlm_dflash.toml'))\n"
        f"print(sorted(set({sorted(HEAVY)}) & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
