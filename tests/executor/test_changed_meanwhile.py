"""What a stage makes while its code or data changes is never taken for what its key says."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from toy_ops import Toy, wait_for

from executor.record import Record

OPS = '''
import time
from pathlib import Path
from attrs import frozen
from dsl.op import Artifact, field, op

HERE = Path(__file__).parent


@frozen
class Text(Artifact):
    """text.txt"""


@op(version=1, run="late:late")
@frozen(kw_only=True)
class Late:
    """Reads its data and imports its code when it is told to."""
    source: str = field(default="builtin", external=True, help="a file")
    output = Text


def late(config, stage):
    with (HERE / "began.txt").open("a") as file:
        file.write("began\\n")
    while not (HERE / "go").exists():
        time.sleep(0.01)
    import lazy
    (stage.out_dir / "text.txt").write_text(lazy.WORD + Path(config.source).read_text())
    (HERE / "read.txt").touch()
    while not (HERE / "end").exists():
        time.sleep(0.01)
'''
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

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, FILE)
        (folder / "late.py").write_text(OPS)
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
        out, errors = process.communicate(timeout=60)
        return process.returncode, out + errors

    def edit(self, name: str, old: str, new: str) -> Callable[[], object]:
        file = self.folder / name
        return lambda: file.write_text(file.read_text().replace(old, new))


def nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [("data.txt", "data", "dada", "content changed: a.source"), ("lazy.py", "code", "core", "code changed: ")],
)
def test_the_node_runs_again_with_the_newest(tmp_path: Path, name: str, old: str, new: str, told: str) -> None:
    late = Late(tmp_path)
    code, said = late.run_with(late.edit(name, old, new), nothing)
    assert (code, late.begun()) == (0, 2), said
    assert "its code or data changed while it ran" in said
    assert told in said
    expected = "code data".replace(old, new)
    assert late.text("a") == expected
    late.edit(name, new, old)()
    assert late.dflow("run", str(late.file)).returncode == 0
    assert late.text("a") == "code data"


@pytest.mark.parametrize(("name", "old", "new"), [("data.txt", "data", "dada"), ("lazy.py", "code", "core")])
def test_what_was_changed_and_put_back_is_seen_too(tmp_path: Path, name: str, old: str, new: str) -> None:
    late = Late(tmp_path)
    stamp = (tmp_path / name).stat()

    def put_back() -> None:
        late.edit(name, new, old)()
        os.utime(tmp_path / name, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))

    code, said = late.run_with(late.edit(name, old, new), put_back)
    assert (code, late.begun()) == (0, 2), said
    assert f"written meanwhile: {tmp_path / name}" in said
    assert late.text("a") == "code data"


def test_nothing_of_a_changed_attempt_is_kept(tmp_path: Path) -> None:
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
    assert error.endswith("3 times in a row; leave them as they are, and resume")
    assert list(late.store.glob("objects/*")) == []


def test_an_edit_of_a_comment_is_no_other_code_but_a_file_written_meanwhile(tmp_path: Path) -> None:
    late = Late(tmp_path)
    code, said = late.run_with(late.edit("lazy.py", "\n", "  # a comment\n"), nothing)
    assert (code, late.begun()) == (0, 2), said
    newest = max(late.store.glob("records/*/events.jsonl"))
    assert '"outdated"' in newest.read_text()
    assert Record.load(newest.parent).state.nodes["a"].cache == "miss"
