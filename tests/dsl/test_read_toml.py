"""Pipeline files: what is read, and how mistakes are shown."""

from pathlib import Path

import pytest
from written_files import HEAD, INGEST, INJECT, mistakes, write

from dsl.errors import PipelineError
from dsl.graph import Graph
from dsl.op import Ref
from dsl.pipeline import Launch
from dsl.read_toml import read_graph
from ops.ingest.op import Ingest
from ops.inject_images.op import InjectImages

PASS_ON = """
from attrs import frozen
from dsl.op import op
from ops.artifacts import Samples

@op(version=1, run="pass_ops:pass_on")
@frozen(kw_only=True)
class PassOn:
    samples: Samples
    output = Samples
"""

PYTHON = """
from dsl.pipeline import Launch, Pipeline
from ops.ingest.op import Ingest
from ops.inject_images.op import InjectImages

def pipeline() -> Pipeline:
    p = Pipeline("p", seed=7)
    samples = p.node("ingest", Ingest(source="data.jsonl", val_fraction=0))
    p.node("inject", InjectImages(samples=samples), launch=Launch(threads=2))
    return p
"""


def test_a_pipeline_file_with_eight_different_mistakes_reports_all_eight_at_once(tmp_path: Path) -> None:
    write(tmp_path, PASS_ON, "pass_ops.py")
    text = """\
[pipeline]
name = "eight"
ops = ["pass_ops.py"]

[node.ingest]
op = "ingest"
source = "builtin:digits"
max_samples = 8.7

[node.inject]
op = "inject_image"
samples = "@ingest"

[node.tokenize]
op = "tokenize_chat"
samples = "@injekt"
vocab_size = 12

[node.target]
op = "finetune_vlm"
tokens = "@ingest"
weigth_decay = 0.1

[node.capture]
op = "capture_targets"
tokens = "@tokenize"

[node.first]
op = "pass_on"
samples = "@third"

[node.second]
op = "pass_on"
samples = "@first"

[node.third]
op = "pass_on"
samples = "@second"
"""
    assert mistakes(tmp_path, text) == [
        "p.toml:8:1: node.ingest.max_samples: expected int or none, got 8.7 (float)",
        'p.toml:11:1: node.inject.op: there is no op "inject_image" (did you mean "inject_images"?)',
        'p.toml:16:1: node.tokenize.samples: there is no node "injekt" (did you mean "inject"?)',
        "p.toml:17:1: node.tokenize.vocab_size: must be >= 300, got 12",
        'p.toml:21:1: node.target.tokens: expected TokenShards, but node "ingest" produces Samples'
        ' (TokenShards: "@tokenize")',
        'p.toml:22:1: node.target.weigth_decay: unknown key (did you mean "weight_decay"?)',
        'p.toml:24:7: node.capture: the required key "target" is missing (a reference to TargetModel: "@node")',
        "p.toml:30:1: node.first.samples: the nodes form a cycle: first (p.toml:30) -> second (p.toml:34)"
        " -> third (p.toml:38) -> first (remove one of these references)",
    ]


def test_a_missing_required_key_is_reported_at_the_node(tmp_path: Path) -> None:
    assert mistakes(tmp_path, HEAD + "[node.a]\nop = 'ingest'\n[node.b]\nsamples = '@a'\n") == [
        'p.toml:3:7: node.a: the required key "source" is missing (str or list of str)',
        'p.toml:5:7: node.b: the required key "op" is missing (the ops: dflow ops)',
    ]


def test_mistakes_outside_the_nodes_are_reported(tmp_path: Path) -> None:
    text = 'nod = 1\nmlflow = 2\n[pipeline]\nsede = 1\nseed = 1.5\n[nodes.x]\nop = "ingest"\n'
    assert mistakes(tmp_path, text) == [
        'p.toml:1:1: nod: unknown key (did you mean "node"?)',
        "p.toml:1:1: node: there is no node (a node is a table [node.<id>] with its op)",
        "p.toml:2:1: mlflow: expected a table ([mlflow])",
        'p.toml:3:2: pipeline: the required key "name" is missing (str)',
        'p.toml:4:1: pipeline.sede: unknown key (did you mean "seed"?)',
        "p.toml:5:1: pipeline.seed: expected int, got 1.5 (float)",
        'p.toml:6:2: nodes: unknown table (did you mean "node"?)',
    ]
    assert mistakes(tmp_path, INGEST) == [
        'p.toml:1:1: pipeline: the required table is missing ([pipeline] with name = "...")'
    ]


def test_a_node_that_is_no_table_or_has_a_malformed_id_is_reported(tmp_path: Path) -> None:
    text = HEAD + "[node]\na = 1\n'1b' = { op = 'ingest', source = 'builtin' }\nc = { op = 3 }\n"
    assert mistakes(tmp_path, text) == [
        "p.toml:4:1: node.a: expected a table ([node.a])",
        'p.toml:5:1: node.1b: node id "1b": letters, digits, "_" and "-" only, and a letter first',
        "p.toml:6:7: node.c.op: expected the name of an op, got 3 (int)",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[pipeline]\nname = \n", "p.toml:2:8: not TOML: expected a value"),
        (
            HEAD + "[node.a]\nop = 'x'\n[node.a]\n",
            "p.toml:5:8: not TOML: Cannot declare ('node', 'a') twice",
        ),
        (
            HEAD + f"x = {'[' * 2000}",
            "p.toml:1:1: not TOML: TOML inline arrays/tables are nested more than the allowed 400 levels",
        ),
    ],
)
def test_what_stops_the_parser_is_reported_alone(tmp_path: Path, text: str, expected: str) -> None:
    assert mistakes(tmp_path, text) == [expected]


def test_a_file_that_is_not_utf_8_is_reported_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_bytes(HEAD.encode() + b"# caf\xe9\n")
    with pytest.raises(PipelineError) as caught:
        read_graph(file)
    assert str(caught.value) == f"{file}:3:6: the file is not UTF-8"


def test_a_missing_file_and_an_unknown_kind_of_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError) as caught:
        read_graph(tmp_path / "p.toml")
    assert str(caught.value) == f"there is no pipeline file {tmp_path}/p.toml"
    assert mistakes(tmp_path, "", name="p.yaml") == ["p.yaml is not a pipeline file: its name must end in .toml or .py"]


def test_everything_that_a_file_says_is_in_the_graph(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").touch()
    text = """
[pipeline]
name = "p"
seed = 7
[mlflow]
experiment = "e"
tracking_uri = "http://localhost:1"
[node.inject]
op = "inject_images"
samples = "@ingest"
launch = { threads = 2 }
[node.ingest]
op = "ingest"
source = "data.jsonl"
val_fraction = 0
"""
    graph = read_graph(write(tmp_path, text))
    assert (graph.name, graph.seed, graph.experiment, graph.tracking_uri) == ("p", 7, "e", "http://localhost:1")
    assert (graph.root, graph.op_files, list(graph.nodes)) == (tmp_path, (), ["ingest", "inject"])
    assert graph.nodes["ingest"].config == Ingest(source=f"{tmp_path}/data.jsonl", val_fraction=0, seed=7)
    assert graph.nodes["inject"].config == InjectImages(samples=Ref("ingest"))
    assert (graph.nodes["inject"].launch, graph.nodes["inject"].inputs) == (Launch(threads=2), {"samples": ("ingest",)})


def test_a_python_pipeline_is_the_twin_of_a_toml_one(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").touch()
    toml = (HEAD + "seed = 7\n" + INGEST.replace("builtin:digits", "data.jsonl") + "val_fraction = 0.0\n" + INJECT) + (
        "launch.threads = 2\n"
    )
    assert read_graph(write(tmp_path, PYTHON, "p.py")) == read_graph(write(tmp_path, toml))


def test_a_python_pipeline_that_was_just_edited_is_read_anew(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        text = PYTHON.replace("seed=7", f"seed={seed}").replace("data.jsonl", "builtin")
        assert read_graph(write(tmp_path, text, "p.py")).seed == seed


def test_overrides_apply_to_a_python_pipeline(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").touch()
    file = write(tmp_path, PYTHON, "p.py")
    graph = read_graph(file, ["ingest.source=other.jsonl", "inject.launch.threads=3"])
    assert graph.nodes["ingest"].config.source == f"{tmp_path}/other.jsonl"
    assert graph.nodes["inject"].launch == Launch(threads=3)


def test_mistakes_of_a_python_pipeline_and_of_its_overrides_come_together(tmp_path: Path) -> None:
    text = "from dsl.op import Ref\n" + PYTHON.replace("samples=samples", 'samples=Ref("x")')
    assert mistakes(tmp_path, text, "ingest.seed=x", name="p.py") == [
        "node.ingest.source: there is no file or folder data.jsonl (create it, or give another path: "
        "-s ingest.source=PATH)",
        'node.inject.samples: there is no node "x" (Samples: "@ingest")',
        '-s ingest.seed=x: expected int or none, got "x"',
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def pipeline(:\n", "p.py:1:14: SyntaxError: invalid syntax"),
        ("x = 1\ny = [1][x]\n", "p.py:2:5: IndexError: list index out of range"),
        (
            PYTHON.replace("val_fraction=0", "val_fraction='0'"),
            'p.py:8:32: ingest.val_fraction: expected float, got "0"',
        ),
        ("x = 1\n", "p.py: a pipeline file in Python has a function pipeline() that returns a Pipeline"),
        (
            "def pipeline(): return 1\n",
            "p.py: a pipeline file in Python has a function pipeline() that returns a Pipeline, not 1 (int)",
        ),
    ],
)
def test_an_error_in_a_python_pipeline_is_shown_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    assert mistakes(tmp_path, text, name="p.py") == [expected]


def test_a_large_file_is_read_quickly(tmp_path: Path) -> None:
    write(tmp_path, PASS_ON, "pass_ops.py")
    nodes = [f'[node.n{k}]\nop = "pass_on"\nsamples = "@{f"n{k - 1}" if k else "ingest"}"\n' for k in range(2000)]
    graph: Graph = read_graph(write(tmp_path, HEAD + 'ops = ["pass_ops.py"]\n' + INGEST + "".join(nodes)))
    assert list(graph.nodes) == ["ingest", *(f"n{k}" for k in range(2000))]
