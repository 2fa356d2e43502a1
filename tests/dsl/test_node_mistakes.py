"""Mistakes in a single node: values of the wrong type or out of bounds, launches that do not fit, wrong edges."""

from pathlib import Path

import pytest
from written_files import INGEST, mistakes, write

from dsl.graph import graph_from_json, graph_to_json
from dsl.pipeline import Launch
from dsl.read_toml import read_graph

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


def node_mistakes(folder: Path, op: str, *lines: str) -> list[str]:
    """Mistakes in a node "n" whose keys begin in line 8."""
    write(folder, MEASURE, "measure_ops.py")
    head = 'pipeline = { name = "p", ops = ["measure_ops.py"] }\n\n'
    text = head + INGEST + f'[node.n]\nop = "{op}"\n' + "\n".join(lines) + "\n"
    return [line.removeprefix("p.toml:") for line in mistakes(folder, text)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("share = true", "share: expected float, got true (bool)"),
        ('share = "0.1"', 'share: expected float, got "0.1"'),
        ("share = 1", "share: must be < 1, got 1.0"),
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
            "file: there is no file or folder owner/name (create it, or give another path: -s n.file=PATH)",
        ),
        (
            'file = "a/../b.jsonl"',
            "file: there is no file or folder b.jsonl (create it, or give another path: -s n.file=PATH)",
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
        ('launch.kind = "mpi"', 'launch.kind: expected one of "process", "ranks", "ray", got "mpi"'),
        ("launch.nproc = 2", 'launch.nproc: nproc > 1 needs kind = "ranks" or "ray"'),
        ("launch.sp_degree = 0", "launch.sp_degree: must be >= 1, got 0"),
        ("launch.sp_degree = 2.0", "launch.sp_degree: expected int, got 2.0 (float)"),
        ("launch.sp_degree = 2", 'launch.sp_degree: sp_degree > 1 needs kind = "ranks" or "ray"'),
    ],
)
def test_a_wrong_value_is_reported_with_field_and_value(tmp_path: Path, line: str, expected: str) -> None:
    column = 8 if expected.startswith("launch.") else 1
    expected = expected.replace("NOWHERE", str(tmp_path.parent / "name"))
    assert node_mistakes(tmp_path, "measure", line) == [f"8:{column}: node.n.{expected}"]


def test_an_op_for_one_process_is_refused_on_several_ranks(tmp_path: Path) -> None:
    lines = ['source = "builtin:digits"', 'launch = { kind = "ranks", nproc = 2 }']
    message = 'the op "ingest" runs in one process (leave launch out, or set kind = "process")'
    assert node_mistakes(tmp_path, "ingest", *lines) == [f"9:12: node.n.launch.kind: {message}"]


@pytest.mark.parametrize(
    ("nproc", "expected"),
    [
        (
            "2",
            "8:28: node.n.launch.sp_degree: fewer ranks than the mesh needs: nproc = 2, sp_degree = 4;"
            " take nproc = 4 or a multiple of it, or a smaller sp_degree",
        ),
        (
            "6",
            "8:28: node.n.launch.sp_degree: nproc = 6 is not a multiple of sp_degree = 4;"
            " take nproc = 4 or 8, or another sp_degree",
        ),
        ('"6"', '8:43: node.n.launch.nproc: expected int, got "6"'),  # and nothing about its fit
    ],
)
def test_ranks_that_make_no_whole_groups_are_refused_with_all_other_mistakes(
    tmp_path: Path, nproc: str, expected: str
) -> None:
    lines = [f'launch = {{ kind = "ranks", sp_degree = 4, nproc = {nproc} }}', "share = 1"]
    assert node_mistakes(tmp_path, "measure", *lines) == [expected, "9:1: node.n.share: must be < 1, got 1.0"]


def test_sequence_parallelism_is_refused_for_an_op_that_does_none(tmp_path: Path) -> None:
    lines = ['parts = ["@ingest"]', 'launch = { kind = "ranks", nproc = 4, sp_degree = 2 }', "more = 1"]
    hint = "leave sp_degree out; every rank then takes whole sequences"
    message = f'the op "merge" does not support sequence parallelism ({hint})'
    assert node_mistakes(tmp_path, "merge", *lines) == [
        f"9:39: node.n.launch.sp_degree: {message}",
        "10:1: node.n.more: unknown key (keys: parts, extra)",
    ]


def test_the_degree_of_sequence_parallelism_travels_with_the_launch(tmp_path: Path) -> None:
    write(tmp_path, MEASURE, "measure_ops.py")
    head = 'pipeline = { name = "p", ops = ["measure_ops.py"] }\n\n'
    file = write(tmp_path, head + '[node.n]\nop = "measure"\nlaunch = { kind = "ranks", nproc = 4, sp_degree = 2 }\n')
    assert read_graph(file).nodes["n"].launch == Launch(kind="ranks", nproc=4, sp_degree=2)
    graph = read_graph(file, ["n.launch.sp_degree=4"])
    assert graph.nodes["n"].launch == Launch(kind="ranks", nproc=4, sp_degree=4)
    record = graph_to_json(graph)
    assert graph_from_json(record) == graph
    del record["nodes"][0]["launch"]["sp_degree"]  # as written before there was one
    assert graph_from_json(record).nodes["n"].launch.sp_degree == 1
    refused = mistakes(tmp_path, file.read_text(), "n.launch.sp_degree=3")
    assert refused == [
        "-s n.launch.sp_degree=3: nproc = 4 is not a multiple of sp_degree = 3;"
        " take nproc = 3 or 6, or another sp_degree"
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
            "8:1: P: the nodes form a cycle: n (p.toml:8) -> n (remove one of these references)",
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
            '9:1: node.n.extra: expected TokenShards, but node "ingest" produces Samples'
            " (no node produces TokenShards)",
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
        "6:7: node.n: low to high is less than a step"
    ]


def test_a_misspelled_required_key_is_one_mistake(tmp_path: Path) -> None:
    assert node_mistakes(tmp_path, "merge", 'part = ["@ingest"]') == [
        '8:1: node.n.part: unknown key (did you mean "parts"?)'
    ]
