"""The import rule: docs/architecture.md has the table, and the syntax trees of the whole repository are held to it."""

import ast
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from import_graph import ROOT, imported, module_name, reached

HEAVY = {"torch", "transformers", "mlflow"}
TABLE = ROOT / "docs" / "architecture.md"
TOPS = ("dsl", "ops", "executor", "pipelines")
FILES = [path for top in TOPS for path in sorted((ROOT / top).rglob("*.py"))]
HOOKS = ("op", "plan", "conflicts", "show")  # of an op: what a plan or a report loads of it
OF_STAGES = ("op", "conflicts")  # of those what a stage uses as well
DECLARATIONS = [ROOT / "ops" / "__init__.py", ROOT / "ops" / "artifacts.py"]
DECLARATIONS += [path for hook in HOOKS for path in sorted((ROOT / "ops").glob(f"*/{hook}.py"))]


def rows() -> list[tuple[int, list[str]]]:
    """The rows of the table in docs/architecture.md: the layer, and the rooms of it in their order."""
    lines = [line.split("|") for line in TABLE.read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    return [(int(cells[1]), re.findall(r"`([\w/.]+)`", cells[2])) for cells in lines]


def places() -> dict[str, int]:
    """The place of every room in the table, from the first on."""
    return {room: place for place, room in enumerate(room for _, rooms in rows() for room in rooms)}


def room_of(name: str, rooms: Collection[str]) -> str | None:
    """The innermost room in which a module lies, given as `a.b.c`; rooms are folders or files, given as `a/b`."""
    parts = name.split(".")
    paths = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((room for path in paths for room in (path, f"{path}.py") if room in rooms), None)


def test_every_room_stands_in_the_table_and_there_is_no_other() -> None:
    rooms = places()
    lost = [
        module_name(path) for path in FILES if room_of(module_name(path), rooms) is None and path.stem != "__init__"
    ]
    assert lost == []
    assert [] == [room for room in rooms if not (ROOT / room).exists()]


def test_the_table_has_five_layers_in_their_order() -> None:
    layers = [layer for layer, _ in rows()]
    assert sorted(layers) == layers
    assert {1, 2, 3, 4, 5} == set(layers)


def test_a_room_imports_only_rooms_named_before_it() -> None:
    rooms = places()
    wrong = []
    for path in FILES:
        here = room_of(module_name(path), rooms)
        for name in imported(path) if here is not None else ():
            there = room_of(name, rooms) if name.split(".")[0] in TOPS else None
            if there is not None and there != here and rooms[there] >= rooms[here]:
                wrong.append(f"{path.relative_to(ROOT)} ({here}) imports {name} ({there})")
    assert wrong == []


def test_only_the_tracking_module_imports_mlflow() -> None:
    importing = {
        path.relative_to(ROOT).as_posix() for path in FILES if "mlflow" in {n.split(".")[0] for n in imported(path)}
    }
    assert importing <= {"executor/tracking/mlflow_client.py"}


def test_modules_are_imported_by_name_only_by_named_function_for_hooks_and_by_a_worker_that_waits() -> None:
    calls = {
        (path.relative_to(ROOT).as_posix(), ast.unparse(node.func).rpartition(".")[2])
        for path in FILES
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call)
    }
    by_name = {file for file, function in calls if function in {"import_module", "__import__"}}
    assert by_name == {"dsl/imports.py", "dsl/op_class.py", "executor/launchers/worker.py"}
    assert {file for file, function in calls if function == "named_function"} == {
        "dsl/aliases.py",
        "dsl/op_table.py",
        "executor/cli.py",
        "executor/launchers/worker.py",
        "ops/capture_targets/run.py",
        "ops/lib/data/limited_process.py",
        "ops/lib/drafts/algorithms.py",
        "ops/lib/drafts/own_trial.py",
    }


def test_dsl_imports_nothing_heavy() -> None:
    dsl = [path for path in FILES if path.relative_to(ROOT).parts[0] == "dsl"]
    tops = {name.split(".")[0] for path in dsl for name in imported(path)}
    assert tops - sys.stdlib_module_names == {"attrs", "cattrs", "dsl", "networkx", "tomli"}


def test_no_module_imports_a_run_module_and_none_of_those_reaches_a_hook_file() -> None:
    runs = {path: module_name(path) for path in (ROOT / "ops").rglob("run.py")}
    hooks = {
        module_name(path) for hook in HOOKS if hook not in OF_STAGES for path in (ROOT / "ops").glob(f"*/{hook}.py")
    }
    wrong = [
        f"{module_name(path)} imports {name}"
        for path in FILES
        for name in imported(path)
        if any(f"{name}.".startswith(f"{run}.") for run in runs.values())
    ]
    wrong += [f"{name} reaches {hook}" for path, name in runs.items() for hook in sorted(hooks & reached(path))]
    assert wrong == []


@pytest.mark.parametrize("path", DECLARATIONS, ids=module_name)
def test_a_declaration_reaches_no_torch_and_no_run_module(path: Path) -> None:
    names = reached(path)
    assert HEAVY & names == set()
    assert {name for name in names if name.startswith("ops.") and name.split(".")[2:3] == ["run"]} == set()


def test_reading_and_compiling_a_pipeline_loads_neither_torch_nor_mlflow() -> None:
    script = (
        "import sys; from pathlib import Path; import dsl.closure; from dsl.op_table import all_ops\n"
        "from dsl.read_toml import read_graph\n"
        "all_ops(); read_graph(Path('pipelines/vlm_dflash.toml'))\n"
        f"print(sorted(set({sorted(HEAVY)}) & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
