"""A stage runs the very code that its key says: not stale bytecode, not a module of the same name from elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from toy_ops import PROJECT, UNTRACKED

from executor.records.run_record import Record

OP = '''
{before}
from attrs import frozen
from dsl.op import Artifact, field, op
{imports}


@frozen
class Text(Artifact):
    """text.txt"""


@op(version=1, run="said:say")
@frozen(kw_only=True)
class Say:
    """Writes a word."""
    output = Text


def say(config, stage):
    {inside}
    (stage.out_dir / "text.txt").write_text(word.WORD)
'''
FILE = """
[pipeline]
name = "said"
ops = ["said.py"]

[node.a]
op = "say"
"""
PYTHON_FILE = """
import sys
from dsl.pipeline import Pipeline
sys.path.insert(0, "{lib}")
from said import Say

def pipeline():
    made = Pipeline("said", op_files=["said.py"])
    made.node("a", Say())
    return made
"""


class Said:
    """A pipeline of one op that writes the WORD of a module `word`."""

    def __init__(self, folder: Path, before: str = "", imports: str = "import word", inside: str = "pass") -> None:
        self.folder = folder
        self.file = "pipeline.toml"
        (folder / "said.py").write_text(OP.format(before=before, imports=imports, inside=inside))
        (folder / "pipeline.toml").write_text(FILE)

    def write(self, name: str, word: str) -> Path:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'WORD = "{word}"\n')
        return file

    def run(self, *python_path: Path, expected: int = 0) -> str:
        """Run the node; returns the text that it wrote."""
        path = os.pathsep.join(map(str, [PROJECT, *python_path]))
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self.result = subprocess.run(
            [sys.executable, "-c", UNTRACKED, "run", self.file, "--store", "runs"],
            cwd=self.folder,
            env={**kept, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "COLUMNS": "200"},
            capture_output=True,
            text=True,
        )
        assert expected == self.result.returncode, self.result.stdout + self.result.stderr
        node = self.state()
        return (self.folder / "runs" / "objects" / node.digest / "text.txt").read_text() if node.digest else ""

    def state(self):
        newest = max(self.folder.glob("runs/records/*/events.jsonl"))
        return Record.load(newest.parent).state.nodes["a"]


def test_bytecode_of_the_same_size_and_second_is_not_run(tmp_path: Path) -> None:
    said = Said(tmp_path)
    file = said.write("word.py", "old")
    stamp = file.stat()
    subprocess.run([sys.executable, "-m", "compileall", "-q", tmp_path], check=True)
    assert said.run() == "old"
    said.write("word.py", "new")
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert said.run() == "new"


def test_neither_is_that_of_a_package_which_the_run_function_imports(tmp_path: Path) -> None:
    said = Said(tmp_path, imports="", inside="from pack import word")
    said.write("pack/__init__.py", "")
    file = said.write("pack/word.py", "old")
    stamp = file.stat()
    subprocess.run([sys.executable, "-m", "compileall", "-q", tmp_path], check=True)
    assert said.run() == "old"
    said.write("pack/word.py", "new")
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert said.run() == "new"


def test_a_module_of_pythonpath_is_part_of_the_key(tmp_path: Path) -> None:
    said = Said(tmp_path)
    said.write("lib/word.py", "old")
    assert said.run(tmp_path / "lib") == "old"
    said.write("lib/word.py", "new")
    assert said.run(tmp_path / "lib") == "new"


def test_a_module_of_pythonpath_comes_before_one_beside_the_op_file_in_stage_and_key(tmp_path: Path) -> None:
    said = Said(tmp_path)
    said.write("word.py", "beside")
    assert said.run(tmp_path / "lib") == "beside"
    said.write("lib/word.py", "lib")
    assert said.run(tmp_path / "lib") == "lib"
    said.write("word.py", "not run")
    said.run(tmp_path / "lib")
    assert "nothing to do" in said.result.stdout


def test_an_installed_module_comes_before_one_beside_the_op_file_in_stage_and_key(tmp_path: Path) -> None:
    said = Said(tmp_path)
    said.write("word.py", "beside")
    installed = tmp_path / "venv" / "site-packages"
    said.write("venv/site-packages/word.py", "installed")
    assert said.run(installed) == "installed"
    said.write("word.py", "not run")
    said.run(installed)
    assert "nothing to do" in said.result.stdout
    (installed / "word.py").unlink()
    assert said.run(installed) == "not run"


def test_a_folder_that_a_pipeline_file_puts_on_the_path_is_there_in_the_stage_too(tmp_path: Path) -> None:
    said = Said(tmp_path)
    said.write("lib/word.py", "lib")
    said.file = "pipeline.py"
    (tmp_path / said.file).write_text(PYTHON_FILE.format(lib=tmp_path / "lib"))
    assert said.run() == "lib"


@pytest.mark.parametrize("place", ["insert(0, ", "append("])
def test_a_folder_that_an_op_file_puts_on_the_path_is_part_of_the_key(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "project" / "ops"
    folder.mkdir(parents=True)
    said = Said(folder, before=f'import sys\nsys.path.{place}"{tmp_path / "lib"}")')
    said.write("../../lib/word.py", "old")
    assert said.run() == "old"
    said.write("../../lib/word.py", "new")
    assert said.run() == "new"
    assert said.state().warnings == []


def test_a_package_without_init_of_several_folders_is_part_of_the_key(tmp_path: Path) -> None:
    said = Said(tmp_path, imports="import pack.other\nfrom pack import word")
    said.write("lib/pack/word.py", "old")
    said.write("pack/other.py", "other")
    assert said.run(tmp_path / "lib") == "old"
    said.write("lib/pack/word.py", "new")
    assert said.run(tmp_path / "lib") == "new"


def test_a_module_that_only_the_run_finds_is_told(tmp_path: Path) -> None:
    inside = f'import sys; sys.path.insert(0, "{tmp_path / "lib"}"); import word'
    said = Said(tmp_path, imports="", inside=inside)
    file = said.write("lib/word.py", "found")
    assert said.run() == "found"
    (warning,) = said.state().warnings
    assert warning.startswith(f"not part of the key: {file}")
    assert warning in said.result.stdout + said.result.stderr


def test_a_module_that_is_imported_by_a_computed_name_is_told(tmp_path: Path) -> None:
    said = Said(tmp_path, imports="import importlib", inside='word = importlib.import_module("wo" + "rd")')
    file = said.write("word.py", "found")
    assert said.run() == "found"
    (warning,) = said.state().warnings
    assert warning.startswith(f"not part of the key: {file}")


def test_a_module_that_a_library_makes_in_memory_is_not_told(tmp_path: Path) -> None:
    inside = 'import word; made = types.ModuleType("made"); made.__file__ = "_made.py"; sys.modules["made"] = made'
    said = Said(tmp_path, imports="import sys, types, word", inside=inside)
    said.write("word.py", "found")
    assert said.run() == "found"
    assert said.state().warnings == []
