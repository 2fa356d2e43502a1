"""`extends`: what is merged how, and where mistakes are shown."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl import tree
from dsl.errors import PipelineError
from dsl.finding import Position
from dsl.graph import Graph
from dsl.pipeline import Launch
from dsl.read_toml import read_graph
from dsl.tree import merged, read_tree
from ops.ingest.op import Ingest

BASE = """\
[pipeline]
name = "base"
seed = 3
[node.ingest]
op = "ingest"
source = "builtin:digits"
max_samples = 8
launch = { threads = 2, cpus = 3 }
[node.inject]
op = "inject_images"
samples = "@ingest"
"""


def write(folder: Path, **files: str) -> Path:
    """Files by stem; the first one's path."""
    for stem, text in files.items():
        path = folder / f"{stem.replace('__', '/')}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / f"{next(iter(files))}.toml"


def mistakes(folder: Path, **files: str) -> list[str]:
    with pytest.raises(PipelineError) as caught:
        read_graph(write(folder, **files))
    return str(caught.value).replace(f"{folder}/", "").split("\n")


def read(folder: Path, **files: str) -> Graph:
    return read_graph(write(folder, **files))


def test_tables_are_merged_key_by_key_over_several_levels(tmp_path: Path) -> None:
    graph = read(
        tmp_path,
        top='extends = "middle.toml"\n[node.ingest]\nlaunch.cpus = 4\nval_fraction = 0.5\n',
        middle='extends = "base.toml"\n[pipeline]\nname = "middle"\n[node.ingest]\nmax_samples = 9\n',
        base=BASE,
    )
    assert (graph.name, graph.seed, list(graph.nodes)) == ("middle", 3, ["ingest", "inject"])
    expected = Ingest(source="builtin:digits", max_samples=9, val_fraction=0.5, seed=3)
    assert (graph.nodes["ingest"].config, graph.nodes["ingest"].launch) == (expected, Launch(threads=2, cpus=4))


def test_a_node_that_is_given_another_op_is_replaced_as_a_whole(tmp_path: Path) -> None:
    top = 'extends = "base.toml"\n[node.inject]\nop = "tokenize_chat"\nsamples = "@images"\n' + (
        '[node.images]\nop = "inject_images"\nsamples = "@ingest"\n[node.ingest]\nop = "ingest"\nseed = 1\n'
    )
    graph = read(tmp_path, top=top, base=BASE + "max_dropped = 3\n")
    assert graph.nodes["inject"].op.name == "tokenize_chat"
    assert graph.nodes["inject"].config.max_dropped is None
    assert graph.nodes["ingest"].config.max_samples == 8  # the same op given again


def test_each_mistake_is_shown_in_the_file_that_is_at_fault_all_files_at_once(tmp_path: Path) -> None:
    assert mistakes(
        tmp_path,
        top='extends = "middle.toml"\n[node.ingest]\nmax_samples = 0\n[node.inject]\nsamplse = "x"\n',
        middle='extends = "base.toml"\n[node.ingest]\nval_fraction = 2\n[mlflow]\nnote = "x"\n',
        base=BASE.replace('samples = "@ingest"', 'samples = "@ingst"') + "[nodes]\n",
    ) == [
        "top.toml:3:1: node.ingest.max_samples: must be >= 1, got 0",
        'top.toml:5:1: node.inject.samplse: unknown key (did you mean "samples"?)',
        "middle.toml:3:1: node.ingest.val_fraction: must be < 1, got 2.0",
        'middle.toml:5:1: mlflow.note: unknown key (did you mean "notes"?)',
        'base.toml:11:1: node.inject.samples: there is no node "ingst" (did you mean "ingest"?)',
        'base.toml:12:2: nodes: unknown table (did you mean "node"?)',
    ]


def test_relative_paths_start_at_the_folder_of_the_file_in_which_they_stand(tmp_path: Path) -> None:
    for name in ("a.jsonl", "deep/b.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    source = '[node.ingest]\nsource = "{}"\n'
    base = BASE.replace("builtin:digits", "b.jsonl")
    graph = read(tmp_path, top='extends = "deep/base.toml"\n', deep__base=base)
    assert (graph.nodes["ingest"].config.source, graph.root) == (f"{tmp_path}/deep/b.jsonl", tmp_path)
    graph = read(tmp_path, top='extends = "deep/base.toml"\n' + source.format("a.jsonl"), deep__base=base)
    assert graph.nodes["ingest"].config.source == f"{tmp_path}/a.jsonl"
    graph = read_graph(tmp_path / "top.toml", ["ingest.source=deep/b.jsonl"])
    assert graph.nodes["ingest"].config.source == f"{tmp_path}/deep/b.jsonl"
    assert mistakes(
        tmp_path, top='extends = "deep/base.toml"\n', deep__base=BASE.replace("builtin:digits", "a.jsonl")
    ) == [
        "deep/base.toml:6:1: node.ingest.source: there is no file or folder deep/a.jsonl "
        "(create it, or give another path: -s ingest.source=PATH)"
    ]


def test_op_files_are_found_beside_the_file_that_lists_them(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "extended_ops.py").write_text("""
from attrs import frozen
from dsl.op import op
from ops.artifacts import Samples

@op(version=1, run="extended_ops:nothing")
@frozen(kw_only=True)
class Nothing:
    output = Samples
""")
    base = '[pipeline]\nname = "b"\nops = ["extended_ops.py"]\n[node.n]\nop = "nothing"\n'
    graph = read(tmp_path, top='extends = "deep/base.toml"\n', deep__base=base)
    assert graph.op_files == (tmp_path / "deep" / "extended_ops.py",)
    assert list(graph.nodes) == ["n"]


@pytest.mark.parametrize("name", ["with space", "größer", "a.b"])
def test_folders_may_have_any_name_and_be_symbolic_links(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "base.toml").write_text(BASE)
    (tmp_path / "link").symlink_to(name)
    for folder in (name, "link", f"./{name}/../{name}"):
        assert read(tmp_path, top=f'extends = "{folder}/base.toml"\n').name == "base"
        assert read(tmp_path, top=f'extends = "{tmp_path}/{folder}/base.toml"\n').name == "base"


def test_files_that_extend_each_other_are_reported_with_the_way(tmp_path: Path) -> None:
    assert mistakes(tmp_path, a='extends = "b.toml"\n', b='\nextends = "c.toml"\n', c='extends = "a.toml"\n') == [
        "c.toml:1:1: extends: the files extend each other: a.toml -> b.toml -> c.toml -> a.toml"
    ]
    (tmp_path / "link.toml").symlink_to("d.toml")
    assert mistakes(tmp_path, d='extends = "link.toml"\n') == [
        "d.toml:1:1: extends: the files extend each other: d.toml -> link.toml"
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("3", 'expected the path of another pipeline file, got 3 (int) (extends = "base.toml")'),
        ('["b.toml"]', 'expected the path of another pipeline file, got ["b.toml"] (list) (extends = "base.toml")'),
        ('""', 'expected the path of another pipeline file, got "" (extends = "base.toml")'),
        ('"base.py"', "only a TOML file can be extended, not base.py"),
        ('"none.toml"', "the pipeline file none.toml cannot be read: No such file or directory"),
        ('"folder.toml"', "the pipeline file folder.toml cannot be read: Is a directory"),
        ('"loop.toml"', "the pipeline file loop.toml cannot be read: Too many levels of symbolic links"),
        ('"a\\u0000.toml"', "the pipeline file a\\x00.toml cannot be read: embedded null byte"),
    ],
)
def test_a_base_that_cannot_be_read_is_told_where_it_is_named(tmp_path: Path, value: str, expected: str) -> None:
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    assert mistakes(tmp_path, top=f"\nextends = {value}\n{BASE}") == [f"top.toml:2:1: extends: {expected}"]


def test_a_base_that_is_no_toml_is_told_with_its_own_line(tmp_path: Path) -> None:
    assert mistakes(tmp_path, top='extends = "base.toml"\n', base="[pipeline]\nname = \n") == [
        "base.toml:2:8: not TOML: expected a value"
    ]
    assert mistakes(tmp_path, top='extends = "base.toml"\n', base=f"x = {'9' * 5000}\n") == [
        "base.toml:1:1: not TOML: Exceeds the limit (4300 digits) for integer string conversion: "
        "value has 5000 digits; use sys.set_int_max_str_digits() to increase the limit"
    ]


def test_extends_inside_a_table_is_an_unknown_key(tmp_path: Path) -> None:
    assert mistakes(tmp_path, top='[pipeline]\nname = "p"\nextends = "base.toml"\n[node]\n') == [
        "top.toml:3:1: pipeline.extends: unknown key (keys: name, seed, ops, drafts)"
    ]


def test_a_right_file_is_never_scanned_for_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_text: str, _file: str) -> dict[Any, Position]:
        raise AssertionError("scanned")

    file = write(tmp_path, top='extends = "base.toml"\n[node.ingest]\nmax_samples = 2\n', base=BASE)
    (tmp_path / "a.jsonl").touch()
    monkeypatch.setattr(tree, "key_positions", lambda _text, _file: {("extends",): Position("x", 1, 1)})
    assert read_graph(file, ["ingest.source=a.jsonl"]).nodes["ingest"].config.max_samples == 2
    monkeypatch.setattr(tree, "key_positions", refuse)
    (tmp_path / "base.toml").replace(file)
    assert read_graph(file).name == "base"


def test_a_place_is_looked_up_in_the_file_whose_value_counts(tmp_path: Path) -> None:
    file = write(tmp_path, top='extends = "base.toml"\n[node.ingest]\nmax_samples = 2\n', base=BASE)
    found = read_tree(file)
    assert found.position(("node", "ingest", "max_samples")) == Position(str(file), 3, 1)
    assert found.position(("node", "ingest", "source")) == Position(f"{tmp_path}/base.toml", 6, 1)
    assert found.position(("node", "ingest", "nothing")) == found.position(("node", "ingest"))
    assert found.position(("nothing",)) is None


PLAIN = st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2))
TABLES = st.recursive(
    PLAIN,
    lambda inner: st.builds(dict.__or__, PLAIN, st.dictionaries(st.sampled_from(["t", "u"]), inner)),
    max_leaves=6,
)


def levels() -> st.SearchStrategy[list[dict[str, Any]]]:
    """Levels of one file. A key is always a table or never, and no level gives a node another op."""
    with_op = st.builds(lambda values: {**values, "op": "x"}, TABLES)
    level = st.fixed_dictionaries(
        {"node": st.dictionaries(st.sampled_from("xy"), TABLES | with_op, max_size=2), "mlflow": TABLES}
    )
    return st.lists(level, min_size=3, max_size=3)


@given(levels())
def test_merging_is_associative_over_the_levels(three: list[dict[str, Any]]) -> None:
    base, middle, top = three
    assert merged(merged(base, middle), top) == merged(base, merged(middle, top))
    assert merged({}, base) == base == merged(base, {})
    assert merged(base, base) == base
