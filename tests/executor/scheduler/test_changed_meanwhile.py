"""A stage runs the code of its key, whatever becomes of the files; what it makes of changed data is not committed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from toy_ops import Toy, wait_for

OPS = '''
import time
from pathlib import Path
from attrs import frozen
from dsl.op import Artifact, field, op

HERE = Path(__file__).parent


@frozen
class Text(Artifact):
    """text.txt"""


@op(version=1, run="late:late", resumable=False)
@frozen(kw_only=True)
class Late:
    """Reads its data and imports its code when it is told to."""
    source: str = field(default="builtin", external=True, help="a file")
    output = Text


def late(config, stage):
    with (HERE / "began.txt").open("a") as file:
        file.write("began\\n")
    (stage.work_dir / "state.txt").write_text("a week's work")
    while not (HERE / "go").exists():
        time.sleep(0.01)
    import lazy
    (stage.out_dir / "text.txt").write_text(lazy.WORD + Path(config.source).read_text())
    (HERE / "read.txt").touch()
    while not (HERE / "end").exists():
        time.sleep(0.01)
'''
RESUMABLE = OPS.replace("resumable=False", "resumable=True")
IN_A_CHILD = OPS.replace(
    """    import lazy
""",
    """    import os
    child = os.fork()
    if child == 0:
        import lazy
        (stage.work_dir / "word.txt").write_text(lazy.WORD)
        os._exit(0)
    os.waitpid(child, 0)
    word = (stage.work_dir / "word.txt").read_text()
""",
).replace("lazy.WORD +", "word +")
FILE = """
[pipeline]
name = "late"
ops = ["late.py"]

[node.a]
op = "late"
source = "data.txt"
"""


class Late(Toy):
    """A stage that begins, reads when `go` is there, and ends when `end` is there."""

    def __init__(self, folder: Path, ops: str = OPS) -> None:
        super().__init__(folder, FILE)
        (folder / "late.py").write_text(ops)
        (folder / "lazy.py").write_text('WORD = "code "\n')
        (folder / "data.txt").write_text("data")

    def begun(self) -> int:
        path = self.folder / "began.txt"
        return path.read_text().count("\n") if path.exists() else 0

    def run_with(self, edit: Callable[[], object], later: Callable[[], object]) -> tuple[int, str]:
        """edit is called before the first attempt reads, later after it did. Returns exit code and output."""
        for name in ("go", "end", "read.txt", "began.txt"):
            (self.folder / name).unlink(missing_ok=True)
        process = self.start("run", str(self.file))
        wait_for(lambda: self.begun() == 1)
        edit()
        (self.folder / "go").touch()
        wait_for((self.folder / "read.txt").exists)
        later()
        (self.folder / "end").touch()
        out, errors = process.communicate(timeout=300)
        return process.returncode, out + errors

    def edit(self, name: str, old: str, new: str) -> Callable[[], object]:
        file = self.folder / name
        return lambda: file.write_text(file.read_text().replace(old, new))


def nothing() -> None:
    pass


@pytest.mark.parametrize("ops", [OPS, RESUMABLE, IN_A_CHILD], ids=["plain", "resumable", "in a child"])
def test_a_module_that_is_imported_late_runs_as_its_key_says_though_it_was_edited(tmp_path: Path, ops: str) -> None:
    late = Late(tmp_path, ops)
    code, said = late.run_with(late.edit("lazy.py", "code", "core"), nothing)
    assert (code, late.begun()) == (0, 1), said
    assert late.text("a") == "code data"
    edited = late.dflow("run", str(late.file))
    assert (edited.returncode, late.begun()) == (0, 2), edited.stderr
    assert late.text("a") == "core data"
    late.edit("lazy.py", "core", "code")()
    assert "nothing to do" in late.dflow("run", str(late.file)).stdout
    assert late.text("a") == "code data"


def test_a_data_file_of_the_code_is_read_as_its_key_says_though_it_was_edited(tmp_path: Path) -> None:
    reading = 'from pkgutil import get_data\n    word = get_data("pack", "word.txt").decode()'
    late = Late(tmp_path, OPS.replace("import lazy", reading).replace("lazy.WORD", "word"))
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "word.txt").write_text("code ")
    code, said = late.run_with(late.edit("pack/word.txt", "code", "core"), nothing)
    assert (code, late.begun()) == (0, 1), said
    assert late.text("a") == "code data"
    assert late.dflow("run", str(late.file)).returncode == 0
    assert late.text("a") == "core data"


def test_an_edit_of_a_module_that_runs_is_one_for_the_next_run(tmp_path: Path) -> None:
    late = Late(tmp_path)
    code, said = late.run_with(nothing, late.edit("late.py", "lazy.WORD +", "lazy.WORD.upper() +"))
    assert (code, late.begun()) == (0, 1), said
    assert late.text("a") == "code data"
    assert late.dflow("run", str(late.file)).returncode == 0
    assert late.text("a") == "CODE data"
    late.edit("late.py", "lazy.WORD.upper() +", "lazy.WORD +")()
    assert "nothing to do" in late.dflow("run", str(late.file)).stdout
    assert late.text("a") == "code data"


def breaks(file: Path) -> None:
    file.write_text("def half of an edit")


def goes(file: Path) -> None:
    file.unlink()


def becomes_a_package(file: Path) -> None:
    file.unlink()
    file.with_suffix("").mkdir()
    (file.with_suffix("") / "__init__.py").write_text('WORD = "package "')


@pytest.mark.parametrize("happens", [breaks, goes, becomes_a_package])
@pytest.mark.parametrize("name", ["lazy.py", "pack/__init__.py", "pack/lazy.py"])
def test_neither_a_broken_nor_a_missing_file_ends_a_stage_that_runs(
    tmp_path: Path, name: str, happens: Callable[[Path], None]
) -> None:
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    late = Late(tmp_path, OPS.replace("import lazy", f"import {module} as lazy"))
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / name).write_text('WORD = "code "\n')
    code, said = late.run_with(lambda: happens(tmp_path / name), nothing)
    assert (code, late.begun()) == (0, 1), said
    assert late.text("a") == "code data"


def test_a_folder_of_code_that_goes_does_not_end_a_stage_that_runs(tmp_path: Path) -> None:
    late = Late(tmp_path, OPS.replace("import lazy", "import pack.lazy as lazy"))
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "lazy.py").rename(tmp_path / "pack" / "lazy.py")
    code, said = late.run_with(lambda: shutil.rmtree(tmp_path / "pack"), nothing)
    assert (code, late.begun()) == (0, 1), said
    assert late.text("a") == "code data"


def test_an_error_is_shown_with_the_line_that_ran(tmp_path: Path) -> None:
    late = Late(tmp_path, OPS.replace("import lazy\n", "import lazy; lazy.fail()\n"))
    (tmp_path / "lazy.py").write_text("def fail():\n    1 / 0  # as it was\n")
    for name in ("go", "end"):
        (tmp_path / name).unlink(missing_ok=True)
    process = late.start("run", str(late.file))
    wait_for(lambda: late.begun() == 1)
    (tmp_path / "lazy.py").write_text("\ndef fail():\n    1 / 1  # as it is\n")
    (tmp_path / "go").touch()
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "1 / 0  # as it was" in out + errors


@pytest.mark.parametrize("ops", [OPS, RESUMABLE], ids=["plain", "resumable"])
def test_after_other_data_the_node_runs_again_with_the_newest(tmp_path: Path, ops: str) -> None:
    late = Late(tmp_path, ops)
    code, said = late.run_with(late.edit("data.txt", "data", "dada"), nothing)
    assert (code, late.begun()) == (0, 2), said
    assert "its code or data changed while it ran (content changed: a.source)" in said
    assert late.text("a") == "code dada"
    late.edit("data.txt", "dada", "data")()
    assert late.dflow("run", str(late.file)).returncode == 0
    assert (late.text("a"), late.begun()) == ("code data", 3)


def test_what_a_resumable_op_made_of_other_data_is_kept_where_no_key_finds_it(tmp_path: Path) -> None:
    late = Late(tmp_path, RESUMABLE)
    code, said = late.run_with(late.edit("data.txt", "data", "dada"), nothing)
    assert code == 0, said
    (kept,) = [path for path in late.store.glob("work/*") if path.is_dir()]
    assert f"what it made is kept in {kept}, and it runs again" in said
    assert (kept / "state" / "state.txt").read_text() == "a week's work"
    late.edit("data.txt", "dada", "data")()
    assert late.dflow("run", str(late.file)).returncode == 0
    assert late.state()["nodes"]["a"].get("cache", "miss") == "miss"
    assert kept.is_dir()


@pytest.mark.parametrize(("ops", "begun"), [(OPS, 2), (RESUMABLE, 1)], ids=["plain", "resumable"])
def test_data_that_was_changed_and_put_back_counts_where_running_again_costs_little(
    tmp_path: Path, ops: str, begun: int
) -> None:
    late = Late(tmp_path, ops)
    (tmp_path / "old.txt").write_text("data")
    code, said = late.run_with(nothing, lambda: (tmp_path / "old.txt").replace(tmp_path / "data.txt"))
    assert (code, late.begun()) == (0, begun), said
    assert late.text("a") == "code data"
    told = f"{tmp_path / 'data.txt'} was written while the stage ran; its content is the same"
    assert (begun == 1) == (told in late.state()["nodes"]["a"].get("warnings", []))
    assert (begun == 2) == (f"written meanwhile: {tmp_path / 'data.txt'}" in said)


def touch_rights(file: Path) -> None:
    file.chmod(0o600)


def link_once_more(file: Path) -> None:
    os.link(file, file.with_suffix(".link"))


@pytest.mark.parametrize("happens", [touch_rights, link_once_more])
def test_other_rights_or_another_link_are_no_change(tmp_path: Path, happens: Callable[[Path], None]) -> None:
    late = Late(tmp_path)
    code, said = late.run_with(lambda: happens(tmp_path / "data.txt"), nothing)
    assert (code, late.begun()) == (0, 1), said
    assert late.text("a") == "code data"
    assert late.state()["nodes"]["a"].get("warnings", []) == []


@pytest.mark.parametrize("edit", ["another", "fewer", "renamed"])
def test_files_that_come_to_a_folder_or_leave_it_are_a_change(tmp_path: Path, edit: str) -> None:
    late = Late(tmp_path, OPS.replace("Path(config.source).read_text()", "'+'.join(sorted(os.listdir(config.source)))"))
    late.edit("late.py", "import time", "import os, time")()
    late.edit("pipeline.toml", "data.txt", "data")()
    (tmp_path / "data").mkdir()
    for name in ("x", "y"):
        (tmp_path / "data" / name).touch()
    edits = {
        "another": lambda: (tmp_path / "data" / "z").touch(),
        "fewer": lambda: (tmp_path / "data" / "y").unlink(),
        "renamed": lambda: (tmp_path / "data" / "y").rename(tmp_path / "data" / "z"),
    }
    code, said = late.run_with(edits[edit], nothing)
    assert (code, late.begun()) == (0, 2), said
    expected = {"another": "x+y+z", "fewer": "x", "renamed": "x+z"}
    assert late.text("a") == f"code {expected[edit]}"


def test_nothing_is_kept_of_an_attempt_at_an_op_that_cannot_resume(tmp_path: Path) -> None:
    late = Late(tmp_path)
    code, said = late.run_with(late.edit("data.txt", "data", "dada"), nothing)
    assert code == 0, said
    assert len(list(late.store.glob("objects/*"))) == 1
    assert len(list(late.store.glob("index/*"))) == 1
    assert [path for path in late.store.glob("work/*") if path.is_dir()] == []


def test_data_that_changes_all_the_time_fails_the_node(tmp_path: Path) -> None:
    late = Late(tmp_path)
    for name in ("go", "end"):
        (tmp_path / name).touch()
    (tmp_path / "late.py").write_text(OPS + "    Path(config.source).write_text(str(time.time()))\n")
    result = late.dflow("run", str(late.file))
    assert (1, 3) == (result.returncode, late.begun()), result.stderr
    error = late.state()["nodes"]["a"]["error"]
    assert error.startswith("StageError: its code or data changed while it ran (content changed: a.source)")
    assert error.endswith("3 times in a row; stop editing them, and resume")
    assert list(late.store.glob("objects/*")) == []
