"""An external field that is a list of paths: each member counts by its content."""

from pathlib import Path

import pytest
from attrs import frozen

from dsl.errors import PipelineError
from dsl.graph import Graph
from dsl.op import Artifact, field, op
from dsl.read_toml import read_graph
from executor.keys.node_key import KeyParts, Sources, node_parts

OPS = '''
from attrs import frozen
from dsl.op import Artifact, field, op


@frozen
class Text(Artifact):
    """text.txt"""


@op(version=1, run="lists_of_paths:read")
@frozen(kw_only=True)
class Read:
    """Reads texts."""
    sources: tuple[str, ...] = field(default=(), external=True, help="files")
    more: tuple[str, ...] | None = field(default=None, external=True, help="files or none")
    output = Text


def read(config, stage):
    pass
'''


def graph(folder: Path, sources: str) -> Graph:
    (folder / "lists_of_paths.py").write_text(OPS)
    file = folder / "p.toml"
    file.write_text(f'[pipeline]\nname = "p"\nops = ["lists_of_paths.py"]\n[node.a]\nop = "read"\n{sources}\n')
    return read_graph(file)


def parts(folder: Path, sources: str) -> KeyParts:
    return node_parts(graph(folder, sources), "a", Sources.now(None))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lists")


@pytest.mark.parametrize("name", ["sources", "more"])
def test_the_content_of_each_file_is_part_of_the_key(folder: Path, name: str) -> None:
    (folder / "one.txt").write_text("one")
    (folder / "two.txt").write_text("two")
    written = f'{name} = ["one.txt", "builtin:x", "two.txt"]'
    before = parts(folder, written)
    assert set(before.external) == {f"{name}[0]", f"{name}[2]"}
    (folder / "two.txt").write_text("changed")
    after = parts(folder, written)
    assert before.key({}) != after.key({})
    assert before.external[f"{name}[0]"] == after.external[f"{name}[0]"]


def test_order_and_number_are_part_of_the_key_and_places_on_the_disk_are_not(folder: Path) -> None:
    for name in ("one.txt", "copy.txt"):
        (folder / name).write_text("one")
    (folder / "two.txt").write_text("two")
    lists = ('["one.txt", "two.txt"]', '["two.txt", "one.txt"]', '["one.txt"]', '["one.txt", "one.txt"]', "[]")
    lists = (*lists, '["one.txt", "builtin"]', '["builtin", "one.txt"]')
    assert len({parts(folder, f"sources = {written}").key({}) for written in lists}) == len(lists)
    one, copy = (parts(folder, f'sources = ["{name}"]').key({}) for name in ("one.txt", "copy.txt"))
    assert one == copy


def test_members_are_absolute_paths_in_the_compiled_config(folder: Path) -> None:
    (folder / "one.txt").write_text("one")
    config = graph(folder, 'sources = ["./one.txt", "builtin"]').nodes["a"].config
    assert (str(folder / "one.txt"), "builtin") == config.sources


def test_members_that_are_not_there_are_told_all_at_once(folder: Path) -> None:
    with pytest.raises(PipelineError) as caught:
        graph(folder, 'sources = ["gone1.txt", "", "gone2.txt"]')
    messages = [mistake.what for mistake in caught.value.mistakes]
    assert [
        f"there is no file or folder {folder / 'gone1.txt'}",
        f"there is no file or folder {folder / 'gone2.txt'}",
        "expected a path, got an empty string",
    ] == messages


def test_a_type_in_which_nobody_looks_for_paths_is_refused_where_it_is_declared() -> None:
    @frozen
    class Text(Artifact):
        """text.txt"""

    @frozen(kw_only=True)
    class Read:
        sources: dict[str, str] = field(default={}, external=True, help="files by name")
        output = Text

    with pytest.raises(TypeError) as caught:
        op(version=1, run="no:where")(Read)
    assert str(caught.value) == "Read.sources: an external field is a str or a tuple[str, ...], or None"
