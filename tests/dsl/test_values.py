"""References in values: `${env:NAME}`, `${node.field}`, `${pipeline.name}`, `${pipeline.seed}`."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.errors import PipelineError
from dsl.graph import Graph
from dsl.interpolation import interpolate
from dsl.op import op_of
from dsl.read_toml import read_graph
from dsl.tree import Tree
from ops.ingest.op import Ingest

OPS = """
from attrs import frozen
from dsl.op import field, op, seed_field
from ops.artifacts import Samples

@op(version=1, run="value_ops:measure")
@frozen(kw_only=True)
class Measure:
    samples: Samples | None = None
    share: float = 0.5
    most: int | None = None
    exact: bool = False
    title: str = "t"
    layers: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    weights: dict[str, float] = field(default={})
    headers: dict[str, str] = field(default={})
    file: str = field(default="builtin", external=True)
    needed: int
    seed: int | None = seed_field()
    output = Samples
"""
KEYS = "share, most, exact, title, layers, names, weights, headers, file, needed, seed"
HEAD = '[pipeline]\nname = "p"\nseed = 7\nops = ["value_ops.py"]\n'


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RATE": "1e-3", "COUNT": "3", "LIST": "[1, 2]", "WORD": "two words", "YES": "true", "NOTHING": "none"}
    for name, value in {**values, "QUOTED": '"x', "HF_TOKEN": "hf_abc", "EMPTY": "", "TABLE": "{ a = 1 }"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("COUNTS", raising=False)


def read(folder: Path, text: str, *overrides: str) -> Graph:
    (folder / "value_ops.py").write_text(OPS)
    file = folder / "p.toml"
    file.write_text(text, encoding="utf-8")
    return read_graph(file, overrides)


def measured(folder: Path, *lines: str, more: str = "") -> Graph:
    """Nodes "a" with all values given, and "n", whose keys begin in line 13."""
    first = '[node.a]\nop = "measure"\nneeded = 5\nshare = 0.25\nlayers = [4, 5]\n'
    node = '[node.n]\nop = "measure"\nneeded = 1\n' + "\n".join(lines) + "\n"
    return read(folder, HEAD + first + node + more)


def mistakes(folder: Path, *lines: str, more: str = "") -> list[str]:
    with pytest.raises(PipelineError) as caught:
        measured(folder, *lines, more=more)
    return str(caught.value).replace(f"{folder}/", "").replace("p.toml:", "").split("\n")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('share = "${env:RATE}"', 0.001),
        ('most = "${env:COUNT}"', 3),
        ('most = "${env:NOTHING}"', None),
        ('exact = "${env:YES}"', True),
        ('title = "${env:WORD}"', "two words"),
        ('title = "${env:QUOTED}"', '"x'),
        ('title = "${env:EMPTY}"', ""),
        ('title = "<${env:WORD}|${env:COUNT}>"', "<two words|3>"),
        ('layers = "${env:LIST}"', (1, 2)),
        ('layers = [1, "${env:COUNT}"]', (1, 3)),
        ('names = ["${env:WORD}", "x-${env:COUNT}"]', ("two words", "x-3")),
        ('weights = { a = "${env:RATE}" }', {"a": 0.001}),
        ('weights = "${env:TABLE}"', {"a": 1}),
        ('share = "${a.share}"', 0.25),
        ('most = "${a.needed}"', 5),
        ('layers = "${a.layers}"', (4, 5)),
        ('title = "${a.title}"', "t"),
        ('title = "${a.share} ${a.exact} ${a.needed}"', "0.25 false 5"),
        ('title = "${pipeline.name}-${pipeline.seed}"', "p-7"),
        ('most = "${pipeline.seed}"', 7),
        ('most = "${a.seed}"', 7),
        ('most = "${a.launch.retries}"', 2),
        ('title = "$${a.share} $$ $x {a} $ ${a.share}"', "${a.share} $$ $x {a} $ 0.25"),
        ('title = "$${env:WORD} ${env:WORD}"', "${env:WORD} two words"),
        ('title = "$${a ${env:WORD}}"', "${a two words}"),
        ('title = "Bearer ${secret:HF_TOKEN}"', "Bearer ${secret:HF_TOKEN}"),
        ('title = "${env:HF_TOKEN}"', "${env:HF_TOKEN}"),
        ('title = "$${secret:HF_TOKEN}"', "$${secret:HF_TOKEN}"),
        ('headers = { auth = "x ${env:HF_TOKEN} ${env:COUNT}" }', {"auth": "x ${env:HF_TOKEN} 3"}),
    ],
)
def test_a_reference_takes_the_value_with_its_type_or_as_text(tmp_path: Path, line: str, expected: object) -> None:
    config = measured(tmp_path, line).nodes["n"].config
    assert getattr(config, line.split(" ")[0]) == expected


def test_references_stand_in_launch_edges_and_the_other_tables_too(tmp_path: Path) -> None:
    more = '[mlflow]\nexperiment = "${pipeline.name}-${n.title}"\ntags = { share = "at ${a.share}" }\nnotes = "$${x}"\n'
    lines = ['samples = "@${n.title}"', 'title = "a"', 'launch = { cpus = "${env:COUNT}", memory = "${env:COUNT} GB" }']
    graph = measured(tmp_path, *lines, more=more)
    assert (graph.experiment, graph.tags, graph.notes) == ("p-a", {"share": "at 0.25"}, "${x}")
    assert (graph.nodes["n"].launch.cpus, graph.nodes["n"].launch.memory) == (3, "3 GB")
    assert graph.nodes["n"].inputs == {"samples": ("a",)}


def test_a_reference_sees_the_value_behind_an_override(tmp_path: Path) -> None:
    text = HEAD + '[node.a]\nop = "measure"\nneeded = 1\n[node.b]\nop = "measure"\nneeded = "${a.needed}"\n'
    assert read(tmp_path, text, "a.needed=9").nodes["b"].config.needed == 9
    assert read(tmp_path, text, "a.share=${b.needed}").nodes["a"].config.share == 1
    assert read(tmp_path, text, "a.seed=${pipeline.seed}", "pipeline.seed=8").nodes["a"].config.seed == 8
    assert read(tmp_path, text, "pipeline.seed=${env:COUNT}").seed == 3


def test_a_chain_of_thousands_of_references_is_followed(tmp_path: Path) -> None:
    nodes = [f'[node.n{k}]\nop = "measure"\nneeded = "${{n{k + 1}.needed}}"\n' for k in range(3000)]
    text = HEAD + "".join(nodes) + '[node.n3000]\nop = "measure"\nneeded = 4\n'
    assert read(tmp_path, text).nodes["n0"].config.needed == 4


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('most = "${env:COUNTS}"', 'the environment variable COUNTS is not set (did you mean "COUNT"?)'),
        ('most = "${env:WORD}"', '${env:WORD}: expected int or none, got "two words"'),
        ('most = "${env:RATE}"', "${env:RATE}: expected int or none, got 0.001 (float)"),
        (
            'title = "${env:COUNT}"',
            "${env:COUNT}: expected str, got 3 (int) (as a text it has quotes of its own: COUNT='\"...\"')",
        ),
        (
            'names = ["a", "${env:COUNT}"]',
            "${env:COUNT}: expected str, got 3 (int) (as a text it has quotes of its own: COUNT='\"...\"')",
        ),
        ('tile = "${env:COUNT}"', 'unknown key (did you mean "title"?)'),
        ('most = "${a.share}"', "expected int or none, got 0.25 (float)"),
        ('most = "${aa.share}"', 'there is no node "aa" (did you mean "a"?)'),
        ('most = "${a.shares}"', 'node "a" has no field "shares" (did you mean "share"?)'),
        ('most = "${a.samples}"', 'node "a": "samples" reads another node, it has no value'),
        ('most = "${a.launch.nprocs}"', 'node "a" has no field "launch.nprocs" (did you mean "nproc"?)'),
        ('title = "x${a.layers}"', "${a.layers} is a list, which cannot be part of a string"),
        ('title = "x${a.most}"', "${a.most} is none, which cannot be part of a string"),
        ('title = "${a}"', '"${a}" is not one of KINDS (a literal ${ is written $${)'),
        ('title = "${}"', '"${}" is not one of KINDS (a literal ${ is written $${)'),
        ('title = "x${a.share"', '"${a.share" has no closing brace (a literal ${ is written $${)'),
        ('title = "${pipeline.nam}"', '${pipeline.nam} is not one of KINDS (did you mean "name"?)'),
        ('title = "${mlflow.notes}"', "${mlflow.notes} is not one of KINDS"),
        ('title = "${n.title}"', "the values refer to each other: n.title -> n.title"),
        (
            'title = "${secret:UNSET_NAME}"',
            "the environment variable UNSET_NAME is not set (export it before you call dflow)",
        ),
    ],
)
def test_a_wrong_reference_is_told_once_with_its_place(tmp_path: Path, line: str, expected: str) -> None:
    kinds = "${node.field}, ${env:NAME}, ${secret:NAME}, ${pipeline.name} or ${pipeline.seed}"
    told = f"13:1: node.n.{line.split(' ')[0]}: {expected.replace('KINDS', kinds)}"
    assert mistakes(tmp_path, line) == [told]


def test_wrong_references_are_told_together_and_what_hangs_on_them_is_not_told_again(tmp_path: Path) -> None:
    lines = ['most = "${c.needed}"', 'share = "${env:COUNTS}"', 'title = "${n.share}"']
    more = '[node.c]\nop = "measure"\nneeded = "${d.needed}"\n[node.d]\nop = "measure"\nneeded = "${c.needed}"\n'
    assert mistakes(tmp_path, *lines, more=more) == [
        '14:1: node.n.share: the environment variable COUNTS is not set (did you mean "COUNT"?)',
        "18:1: node.c.needed: the values refer to each other: c.needed -> d.needed -> c.needed",
    ]


def test_an_op_that_is_read_from_a_node_without_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    nodes = '[node.a]\nop = "${a.source}"\nsource = "ingest"\n[node.b]\nop = "${c.x}"\n[node.c]\nop = "${b.x}"\n'
    file.write_text(f'pipeline = {{ name = "p" }}\n{nodes}')
    with pytest.raises(PipelineError) as caught:
        read_graph(file)
    said = str(caught.value).splitlines()
    assert [f'node.{at}.op: an op cannot be read from node "{of}", whose own op' for at, of in ("aa", "bc", "cb")] == [
        line.partition(": ")[2].partition(" is not known")[0] for line in said
    ]


def test_all_that_is_wrong_within_one_value_is_told(tmp_path: Path) -> None:
    lines = ['title = "${zz.text} ${a.foo} ${zz.text}"', 'names = ["${zz.text}", "${env:COUNTS}", "${env:WORD}"]']
    assert mistakes(tmp_path, *lines) == [
        '13:1: node.n.title: there is no node "zz"',
        f'13:1: node.n.title: node "a" has no field "foo" (keys: {KEYS})',
        '14:1: node.n.names: there is no node "zz"',
        '14:1: node.n.names: the environment variable COUNTS is not set (did you mean "COUNT"?)',
    ]


def test_a_required_value_that_nobody_gives_is_told_where_it_is_asked_for(tmp_path: Path) -> None:
    assert mistakes(tmp_path, 'most = "${c.needed}"', more='[node.c]\nop = "measure"\n') == [
        '13:1: node.n.most: node "c" has no value for needed',
        '14:7: node.c: the required key "needed" is missing (int)',
    ]


def test_a_secret_is_refused_where_everybody_would_read_it(tmp_path: Path) -> None:
    more = '[mlflow]\nnotes = "${secret:HF_TOKEN}"\ntracking_uri = "http://x:${secret:HF_TOKEN}@host"\n'
    assert mistakes(tmp_path, more=more) == [
        "15:1: mlflow.notes: secrets are allowed only in a node's values and in mlflow.tracking_uri"
    ]
    graph = measured(tmp_path, more=more.replace("notes =", "#"))
    assert graph.tracking_uri == "http://x:${secret:HF_TOKEN}@host"


def test_op_files_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPS", "value_ops")
    text = HEAD.replace("value_ops.py", "${env:OPS}.py") + '[node.a]\nop = "measure"\nneeded = 1\n'
    assert read(tmp_path, text).op_files == (tmp_path / "value_ops.py",)


def test_a_path_of_another_files_node_is_taken_from_that_files_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "data.jsonl").touch()
    (tmp_path / "value_ops.py").write_text(OPS)
    (tmp_path / "deep" / "base.toml").write_text('[node.a]\nop = "measure"\nneeded = 1\nfile = "data.jsonl"\n')
    (tmp_path / "p.toml").write_text(
        'extends = "deep/base.toml"\n' + HEAD + '[node.b]\nop = "measure"\nneeded = 1\nfile = "${a.file}"\n'
    )
    nodes = read_graph(tmp_path / "p.toml").nodes
    assert [nodes[node].config.file for node in "ab"] == [f"{tmp_path}/deep/data.jsonl"] * 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text().map(lambda text: text.replace("${", "$")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, st.text())
def test_a_value_without_a_reference_stays_as_it_is(value: object, text: str) -> None:
    escaped = text.replace("${", "$${")
    node = {"op": op_of(Ingest), "question": value, "answer": escaped, "launch": {"device": value}}
    tree = Tree({"node": {"a": node}}, Path.cwd())
    interpolate(tree)
    assert tree.mistakes == []
    assert (tree.nodes["a"]["question"], tree.nodes["a"]["launch"]) == (value, {"device": value})
    assert tree.nodes["a"]["answer"] == text
