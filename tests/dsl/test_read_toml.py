"""Pipeline files: what is read, and how mistakes are shown."""

from pathlib import Path

import pytest

from dsl.errors import PipelineError
from dsl.graph import Graph
from dsl.graph_json import graph_from_json, graph_to_json
from dsl.op import Ref
from dsl.pipeline import Launch
from dsl.read_toml import read_graph, read_pipeline
from ops.ingest.op import Ingest
from ops.inject_images.op import InjectImages

HEAD = '[pipeline]\nname = "p"\n'
INGEST = '[node.ingest]\nop = "ingest"\nsource = "builtin:digits"\n'
INJECT = '[node.inject]\nop = "inject_images"\nsamples = "@ingest"\n'

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

MEASURE = """
from typing import Literal
from attrs import frozen, validators
from dsl.op import field, op
from ops.artifacts import Samples, TokenShards

@op(version=1, run="measure_ops:measure", sequence_parallel=True)
@frozen(kw_only=True)
class Measure:
    share: float = field(default=0.5, validator=validators.and_(validators.ge(0), validators.lt(1)))
    most: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    exact: bool = False
    title: str = field(default="t", validator=validators.min_len(1))
    colour: Literal["red", "blue"] = "red"
    layers: tuple[int, ...] = ()
    weights: dict[str, float] = field(default={})
    file: str = field(default="builtin", external=True)
    model: str = field(default="owner/name", external=True, model_id=True)
    output = TokenShards

def _above_low(instance, attribute, value):
    if value <= instance.low:
        raise ValueError(f"must be above low = {instance.low}, got {value}")

@op(version=1, run="measure_ops:span")
@frozen(kw_only=True)
class Span:
    high: int = field(validator=_above_low)
    low: int
    step: int = 1
    output = Samples

    def __attrs_post_init__(self):
        if self.high - self.low < self.step:
            raise ValueError("low to high is less than a step")

@op(version=1, run="measure_ops:merge")
@frozen(kw_only=True)
class Merge:
    parts: tuple[Samples, ...]
    extra: TokenShards | None = None
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


def write(folder: Path, text: str, name: str = "p.toml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def mistakes(folder: Path, text: str, *overrides: str, name: str = "p.toml") -> list[str]:
    """What reading says, with the folder of the file cut off."""
    with pytest.raises(PipelineError) as caught:
        read_graph(write(folder, text, name), overrides)
    return str(caught.value).replace(f"{folder}/", "").split("\n")


def node_mistakes(folder: Path, op: str, *lines: str) -> list[str]:
    """Mistakes in a node "n" whose keys begin in line 8."""
    write(folder, MEASURE, "measure_ops.py")
    head = 'pipeline = { name = "p", ops = ["measure_ops.py"] }\n\n'
    text = head + INGEST + f'[node.n]\nop = "{op}"\n' + "\n".join(lines) + "\n"
    return [line.removeprefix("p.toml:") for line in mistakes(folder, text)]


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
        'p.toml:21:1: node.target.tokens: expected TokenShards, but node "ingest" gives Samples'
        ' (TokenShards: "@tokenize")',
        'p.toml:22:1: node.target.weigth_decay: unknown key (did you mean "weight_decay"?)',
        'p.toml:24:7: node.capture: the required key "target" is missing (a reference to TargetModel: "@node")',
        "p.toml:30:1: node.first.samples: the nodes form a cycle: first (p.toml:30) -> second (p.toml:34)"
        " -> third (p.toml:38) -> first (one of them must not read what is made of it)",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("share = true", "share: expected float, got true (bool)"),
        ('share = "0.1"', 'share: expected float, got "0.1"'),
        ("share = 1", "share: must be < 1, got 1"),
        ("share = nan", "share: must be >= 0, got nan"),
        ("most = 8.7", "most: expected int or none, got 8.7 (float)"),
        ("most = 8.0", "most: expected int or none, got 8.0 (float)"),
        ("most = true", "most: expected int or none, got true (bool)"),
        ("most = 0", "most: must be >= 1, got 0"),
        ("most = [1]", "most: expected int or none, got [1] (list)"),
        ('exact = "false"', 'exact: expected bool, got "false"'),
        ("exact = 1", "exact: expected bool, got 1 (int)"),
        ("title = 1", "title: expected str, got 1 (int)"),
        ('title = ""', "title: must not be empty"),
        ('colour = "green"', 'colour: expected one of "red", "blue", got "green"'),
        ("layers = 1", "layers: expected list of int, got 1 (int)"),
        ("layers = [1, 2.5]", "layers: member 2: expected int, got 2.5 (float)"),
        ("weights = { a = 1, b = false }", "weights: b: expected float, got false (bool)"),
        (
            'file = "owner/name"',
            "file: there is no file or folder owner/name (put it there, or name another: -s n.file=PATH)",
        ),
        (
            'file = "a/../b.jsonl"',
            "file: there is no file or folder b.jsonl (put it there, or name another: -s n.file=PATH)",
        ),
        ('file = ""', "file: expected a path, got an empty string"),
        (
            'model = "../name"',
            "model: there is no file or folder NOWHERE (neither a path nor a model id of the form owner/name)",
        ),
        ("tittle = 'x'", 'tittle: unknown key (did you mean "title"?)'),
        ("launch = 2", "launch: expected a table (launch = { nproc = 2 })"),
        ("launch.nproc = 0", "launch.nproc: must be >= 1, got 0"),
        ("launch.nprocs = 2", 'launch.nprocs: unknown key (did you mean "nproc"?)'),
        ('launch.kind = "ray"', 'launch.kind: expected one of "process", "torchrun", got "ray"'),
        ("launch.nproc = 2", 'launch.nproc: nproc > 1 needs kind = "torchrun"'),
        ("launch.sp_degree = 0", "launch.sp_degree: must be >= 1, got 0"),
        ("launch.sp_degree = 2.0", "launch.sp_degree: expected int, got 2.0 (float)"),
        ("launch.sp_degree = 2", 'launch.sp_degree: sp_degree > 1 needs kind = "torchrun"'),
    ],
)
def test_a_wrong_value_is_reported_with_field_and_value(tmp_path: Path, line: str, expected: str) -> None:
    column = 8 if expected.startswith("launch.") else 1
    expected = expected.replace("NOWHERE", str(tmp_path.parent / "name"))
    assert node_mistakes(tmp_path, "measure", line) == [f"8:{column}: node.n.{expected}"]


def test_an_op_for_one_process_is_refused_under_torchrun(tmp_path: Path) -> None:
    lines = ['source = "builtin:digits"', 'launch = { kind = "torchrun", nproc = 2 }']
    message = 'the op "ingest" runs in one process (leave launch out, or "process")'
    assert node_mistakes(tmp_path, "ingest", *lines) == [f"9:12: node.n.launch.kind: {message}"]


@pytest.mark.parametrize(
    ("nproc", "expected"),
    [
        (
            "2",
            "8:31: node.n.launch.sp_degree: fewer ranks than the mesh needs: nproc = 2, sp_degree = 4;"
            " take nproc = 4 or a multiple of it, or a smaller sp_degree",
        ),
        (
            "6",
            "8:31: node.n.launch.sp_degree: nproc = 6 is no multiple of sp_degree = 4;"
            " take nproc = 4 or 8, or another sp_degree",
        ),
        ('"6"', '8:46: node.n.launch.nproc: expected int, got "6"'),  # and nothing about its fit
    ],
)
def test_ranks_that_make_no_whole_groups_are_refused_with_all_other_mistakes(
    tmp_path: Path, nproc: str, expected: str
) -> None:
    lines = [f'launch = {{ kind = "torchrun", sp_degree = 4, nproc = {nproc} }}', "share = 1"]
    assert node_mistakes(tmp_path, "measure", *lines) == [expected, "9:1: node.n.share: must be < 1, got 1"]


def test_sequence_parallelism_is_refused_for_an_op_that_does_none(tmp_path: Path) -> None:
    lines = ['parts = ["@ingest"]', 'launch = { kind = "torchrun", nproc = 4, sp_degree = 2 }', "more = 1"]
    message = 'the op "merge" does no sequence parallelism (leave sp_degree out; every rank then takes whole sequences)'
    assert node_mistakes(tmp_path, "merge", *lines) == [
        f"9:42: node.n.launch.sp_degree: {message}",
        "10:1: node.n.more: unknown key (keys: parts, extra)",
    ]


def test_the_degree_of_sequence_parallelism_travels_with_the_launch(tmp_path: Path) -> None:
    write(tmp_path, MEASURE, "measure_ops.py")
    head = 'pipeline = { name = "p", ops = ["measure_ops.py"] }\n\n'
    file = write(
        tmp_path, head + '[node.n]\nop = "measure"\nlaunch = { kind = "torchrun", nproc = 4, sp_degree = 2 }\n'
    )
    assert read_graph(file).nodes["n"].launch == Launch(kind="torchrun", nproc=4, sp_degree=2)
    graph = read_graph(file, ["n.launch.sp_degree=4"])
    assert graph.nodes["n"].launch == Launch(kind="torchrun", nproc=4, sp_degree=4)
    record = graph_to_json(graph)
    assert graph_from_json(record) == graph
    del record["nodes"][0]["launch"]["sp_degree"]  # as written before there was one
    assert graph_from_json(record).nodes["n"].launch.sp_degree == 1
    refused = mistakes(tmp_path, file.read_text(), "n.launch.sp_degree=3")
    assert refused == [
        "-s n.launch.sp_degree=3: nproc = 4 is no multiple of sp_degree = 3; take nproc = 3 or 6, or another sp_degree"
    ]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (['parts = "@ingest"'], '8:1: P: expected a list of references to Samples ("@node"), got "@ingest"'),
        (["parts = []"], '8:1: P: expected a list of references to Samples ("@node"), got [] (list)'),
        (['parts = ["@ingest", "n"]'], '8:1: P: expected a list of references to Samples ("@node"), got LIST (list)'),
        (['parts = ["@igest"]'], '8:1: P: there is no node "igest" (did you mean "ingest"?)'),
        (
            ['parts = ["@ingest", "@n"]'],
            "8:1: P: the nodes form a cycle: n (p.toml:8) -> n (one of them must not read what is made of it)",
        ),
        (
            ['parts = ["@ingest"]', 'extra = "ingest"'],
            '9:1: node.n.extra: expected a reference to TokenShards ("@node"), got "ingest"',
        ),
        (
            ['parts = ["@ingest"]', "extra = 1"],
            '9:1: node.n.extra: expected a reference to TokenShards ("@node"), got 1 (int)',
        ),
        (
            ['parts = ["@ingest"]', 'extra = "@ingest"'],
            '9:1: node.n.extra: expected TokenShards, but node "ingest" gives Samples (no node gives TokenShards)',
        ),
    ],
)
def test_a_wrong_edge_is_reported(tmp_path: Path, lines: list[str], expected: str) -> None:
    expected = expected.replace("P:", "node.n.parts:").replace("LIST", '["@ingest", "n"]')
    assert node_mistakes(tmp_path, "merge", *lines) == [expected]


def test_a_validator_may_look_at_other_fields_and_the_config_as_a_whole_is_validated_last(tmp_path: Path) -> None:
    assert node_mistakes(tmp_path, "span", "high = 3", "low = 3") == ["8:1: node.n.high: must be above low = 3, got 3"]
    assert node_mistakes(tmp_path, "span", "high = 3", "low = 'x'") == ['9:1: node.n.low: expected int, got "x"']
    assert node_mistakes(tmp_path, "span", "high = 4", "low = 3", "step = 2") == [
        "6:7: node.n: span: low to high is less than a step"
    ]


def test_a_missing_required_key_is_reported_at_the_node(tmp_path: Path) -> None:
    assert mistakes(tmp_path, HEAD + "[node.a]\nop = 'ingest'\n[node.b]\nsamples = '@a'\n") == [
        'p.toml:3:7: node.a: the required key "source" is missing (str)',
        'p.toml:5:7: node.b: the required key "op" is missing (the ops: dflow ops)',
    ]


def test_a_misspelled_required_key_is_one_mistake(tmp_path: Path) -> None:
    assert node_mistakes(tmp_path, "merge", 'part = ["@ingest"]') == [
        '8:1: node.n.part: unknown key (did you mean "parts"?)'
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
        ("[pipeline]\nname = \n", "p.toml:2:8: not TOML: there is no value behind the ="),
        (
            HEAD + "[node.a]\nop = 'x'\n[node.a]\n",
            "p.toml:5:2: not TOML: the table [node.a] is declared twice (the first time in line 3)",
        ),
        (
            HEAD + f"x = {'[' * 2000}",
            "p.toml:3:1: not TOML: TOML inline arrays/tables are nested more than the allowed 400 levels",
        ),
    ],
)
def test_what_stops_the_parser_is_reported_alone(tmp_path: Path, text: str, expected: str) -> None:
    assert mistakes(tmp_path, text) == [expected]


def test_a_file_that_is_not_utf_8_is_reported_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_bytes(HEAD.encode() + b"# caf\xe9\n")
    with pytest.raises(PipelineError) as caught:
        read_pipeline(file)
    assert str(caught.value) == f"{file}:3:6: the file is not UTF-8"


def test_a_missing_file_and_an_unknown_kind_of_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError) as caught:
        read_pipeline(tmp_path / "p.toml")
    assert str(caught.value) == f"there is no pipeline file {tmp_path}/p.toml"
    assert mistakes(tmp_path, "", name="p.yaml") == [
        "p.yaml is no pipeline file: its name ends neither in .toml nor in .py"
    ]


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
        "node.ingest.source: there is no file or folder data.jsonl (put it there, or name another: "
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
