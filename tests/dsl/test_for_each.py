"""Copies of nodes: `[for_each]`, `[sweep]` and `--sweep`."""

import itertools
import json
import math
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.compile import override_graph
from dsl.errors import PipelineError
from dsl.for_each import expand, put_sweeps
from dsl.graph import Graph, graph_from_json, graph_to_json
from dsl.op import op_of
from dsl.pipeline import Copy, Launch
from dsl.read_toml import read_graph
from dsl.tree import Tree
from ops.ingest.op import Ingest

PIPELINES = Path(__file__).resolve().parents[2] / "pipelines"
OPS = """
from attrs import frozen
from dsl.op import field, op
from ops.artifacts import Samples

@op(version=1, run="copied_ops:make")
@frozen(kw_only=True)
class Make:
    size: int = 1
    output = Samples

@op(version=1, run="copied_ops:build")
@frozen(kw_only=True)
class Build:
    samples: Samples | None = None
    others: tuple[Samples, ...] = ()
    rate: float = 0.5
    title: str = ""
    weights: dict[str, float] = field(default={})
    layers: tuple[int, ...] = ()
    output = Samples
"""
# data -> capture -> train -> test, and a report of data
CHAIN = """\
pipeline = { name = "p", ops = ["copied_ops.py"] }
[node.data]
op = "make"
[node.capture]
op = "build"
samples = "@data"
[node.train]
op = "build"
samples = "@capture"
rate = 0.1
[node.test]
op = "build"
others = ["@train", "@capture"]
rate = "${train.rate}"
[node.report]
op = "build"
samples = "@data"
"""  # 17 lines


def read(folder: Path, text: str, *overrides: str, sweeps: tuple[str, ...] = ()) -> Graph:
    (folder / "copied_ops.py").write_text(OPS)
    file = folder / "p.toml"
    file.write_text(text, encoding="utf-8")
    return read_graph(file, overrides, sweeps)


def mistakes(folder: Path, text: str, *overrides: str, sweeps: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(PipelineError) as caught:
        read(folder, text, *overrides, sweeps=sweeps)
    return str(caught.value).replace(f"{folder}/", "").split("\n")


def parents(graph: Graph) -> dict[str, tuple[str, ...]]:
    return {node.id: node.parents for node in graph.nodes.values()}


DRAFTS = """
[for_each.draft.small]
train.rate = 0.2
[for_each.draft.large]
train = { rate = 0.3, launch.threads = 2, weights.a = 1 }
"""


def test_what_a_variant_changes_and_all_below_it_is_copied_and_the_rest_is_shared(tmp_path: Path) -> None:
    graph = read(tmp_path, CHAIN + DRAFTS)
    assert parents(graph) == {
        "data": (),
        "capture": ("data",),
        "train-small": ("capture",),
        "train-large": ("capture",),
        "test-small": ("train-small", "capture"),
        "test-large": ("train-large", "capture"),
        "report": ("data",),
    }
    assert [graph.nodes[f"train-{name}"].config.rate for name in ("small", "large")] == [0.2, 0.3]
    assert [graph.nodes[f"test-{name}"].config.rate for name in ("small", "large")] == [0.2, 0.3]
    assert graph.nodes["train-large"].config.weights == {"a": 1}
    assert [graph.nodes[f"train-{name}"].launch for name in ("small", "large")] == [Launch(), Launch(threads=2)]


def test_the_pipeline_that_compares_algorithms_captures_once_and_trains_all_alike() -> None:
    graph = read_graph(PIPELINES / "compare_drafts.toml")
    ops = [node.op.name for node in graph.nodes.values()]
    assert {op: ops.count(op) for op in ("capture_targets", "shard_sequence", "train_dflash", "evaluate")} == {
        "capture_targets": 1,
        "shard_sequence": 1,
        "train_dflash": 15,
        "evaluate": 15,
    }
    assert graph.nodes["capture"].config.final_hidden, "the teacher of dspark"
    trained = [node for node in graph.nodes.values() if node.op.name == "train_dflash"]
    assert {node.inputs["features"] for node in trained} == {("capture",)}
    chosen = [(node.config.algorithm, node.config.seed) for node in trained]
    algorithms = ("dflash", "dflash2", "dspark", "lilicorr", "lilicorr")
    assert chosen == [(name, seed) for name in algorithms for seed in (0, 1, 2)]
    assert [node.config.lilicorr.conv for node in trained[9:]] == [False] * 3 + [True] * 3
    plain = {"algorithm": "dflash", "dflash2": None, "dspark": None, "lilicorr": None, "seed": 0}
    same = [attrs.evolve(node.config, **plain) for node in trained]
    assert all(config == trained[0].config for config in same)
    assert graph.nodes["check-dspark-seed_2"].inputs["report"] == ("eval-dspark-seed_2",)


def test_groups_multiply_and_a_node_is_copied_for_its_own_groups_alone(tmp_path: Path) -> None:
    more = "[for_each.size.one]\ncapture.rate = 1\n[for_each.size.two]\ncapture.rate = 2\n"
    graph = read(tmp_path, CHAIN + DRAFTS + more)
    assert [node for node in graph.nodes if node.startswith("capture")] == ["capture-one", "capture-two"]
    pairs = ["small-one", "small-two", "large-one", "large-two"]
    assert [node for node in graph.nodes if node.startswith("test")] == [f"test-{pair}" for pair in pairs]
    assert parents(graph)["test-large-one"] == ("train-large-one", "capture-one")
    assert parents(graph)["report"] == ("data",)


def test_a_sweep_is_all_combinations_of_its_values(tmp_path: Path) -> None:
    text = CHAIN + "[sweep]\ntrain.rate = [1e-3, 3e-4]\ncapture.layers = [[1, 2], []]\n"
    graph = read(tmp_path, text)
    trained = [node for node in graph.nodes if node.startswith("train")]
    assert trained == [f"train-rate_{rate}-layers_{layers}" for rate in ("0_001", "0_0003") for layers in ("1_2", "2")]
    assert graph.nodes["train-rate_0_001-layers_1_2"].config.rate == 0.001
    assert graph.nodes["capture-layers_1_2"].config.layers == (1, 2)


def test_a_node_that_is_called_as_a_table_is_refused_though_only_its_copies_are_made(tmp_path: Path) -> None:
    text = '[node.machine]\nop = "make"\n[sweep]\nmachine.size = [1, 2]\n'
    (told,) = mistakes(tmp_path, CHAIN + text)
    assert told.endswith('node.machine: node id "machine": that is the table [machine], in -s and in ${...}')


def test_values_of_other_signs_have_other_names(tmp_path: Path) -> None:
    graph = read(tmp_path, CHAIN, sweeps=("train.rate=[1.0, -1.0, -1e-5, 1e-5, -inf, inf]",))
    named = {node.id: node.config.rate for node in graph.nodes.values() if node.id.startswith("train")}
    assert named == {
        "train-rate_1_0": 1.0,
        "train-rate_m1_0": -1.0,
        "train-rate_m1e-05": -1e-5,
        "train-rate_1e-05": 1e-5,
        "train-rate_minf": float("-inf"),
        "train-rate_inf": float("inf"),
    }
    graph = read(tmp_path, CHAIN, sweeps=("train.title=['m1', '-1', '-x']",))
    assert [node for node in graph.nodes if node.startswith("train")] == [
        "train-title_m1", "train-title_m1_2", "train-title_x"
    ]  # fmt: skip


def test_a_sweep_of_the_command_line_takes_the_place_of_the_files(tmp_path: Path) -> None:
    text = CHAIN + "[sweep]\ntrain.rate = [1e-3, 3e-4]\n"
    graph = read(tmp_path, text, sweeps=("train.rate=[1, 2, 3]", "train.title=['a/b', 'a.b']"))
    rates = [(node.config.rate, node.config.title) for node in graph.nodes.values() if node.id.startswith("train")]
    assert rates == list(itertools.product((1, 2, 3), ("a/b", "a.b")))
    file = tmp_path / "p.py"
    file.write_text("""
from dsl.pipeline import Pipeline
from ops.ingest.op import Ingest
from ops.inject_images.op import InjectImages

def pipeline() -> Pipeline:
    p = Pipeline("p")
    p.node("inject", InjectImages(samples=p.node("ingest", Ingest(source="builtin"))))
    return p
""")
    graph = read_graph(file, [], ["ingest.max_samples=[1, 2]"])
    assert parents(graph)["inject-max_samples_2"] == ("ingest-max_samples_2",)
    assert graph.nodes["ingest-max_samples_2"].config.max_samples == 2


def test_a_node_may_read_copies_by_their_own_names(tmp_path: Path) -> None:
    more = '[node.all]\nop = "build"\nothers = ["@train-small", "@train-large"]\n'
    assert parents(read(tmp_path, CHAIN + DRAFTS + more))["all"] == ("train-small", "train-large")


def test_a_value_that_is_the_same_in_all_copies_copies_nobody(tmp_path: Path) -> None:
    more = '[node.other]\nop = "build"\ntitle = "${test.title}x"\n[node.same]\nop = "build"\nrate = "${train.rate}"\n'
    graph = read(tmp_path, CHAIN + DRAFTS + more)
    assert [node for node in graph.nodes if node.startswith(("other", "same"))] == ["other", "same-small", "same-large"]
    assert graph.nodes["other"].config.title == "x"


def test_the_other_tables_may_take_a_value_that_all_copies_share(tmp_path: Path) -> None:
    notes = '[mlflow]\nnotes = "a ${{train.{}}} b"\n'
    assert read(tmp_path, CHAIN + DRAFTS + notes.format("title"), "train.title=x").notes == "a x b"
    assert mistakes(tmp_path, CHAIN + DRAFTS + notes.format("rate")) == [
        "p.toml:24:1: mlflow.notes: ${train.rate} has a different value in each copy (train-small, train-large)"
        " (name one of them)"
    ]


def test_a_variant_may_give_a_node_another_op(tmp_path: Path) -> None:
    more = '[for_each.kind.plain]\n[for_each.kind.made]\ncapture = { op = "make", size = 4 }\n'
    graph = read(tmp_path, CHAIN + more)
    assert graph.nodes["capture-plain"].op.name == "build"
    assert (graph.nodes["capture-made"].op.name, graph.nodes["capture-made"].config.size) == ("make", 4)
    assert parents(graph)["train-made"] == ("capture-made",)


def test_overrides_change_all_copies_or_one(tmp_path: Path) -> None:
    graph = read(tmp_path, CHAIN + DRAFTS, "train.title=x", "train-large.title=y", "test.samples=@train")
    assert [graph.nodes[f"train-{name}"].config.title for name in ("small", "large")] == ["x", "y"]
    assert [graph.nodes[f"test-{name}"].inputs["samples"] for name in ("small", "large")] == [
        ("train-small",),
        ("train-large",),
    ]
    assert read(tmp_path, CHAIN + DRAFTS, "train-small.rate=7").nodes["train-small"].config.rate == 7


def test_an_override_of_what_a_variant_sets_is_refused(tmp_path: Path) -> None:
    assert mistakes(tmp_path, CHAIN + DRAFTS, "train.rate=1", "train.launch={threads=1}") == [
        "-s train.rate=1: for_each.draft.small sets this very value (name one copy: -s train-small.rate=...)",
        "-s train.launch={threads=1}: for_each.draft.large sets this very value"
        " (name one copy: -s train-large.launch.threads=...)",
    ]
    assert mistakes(tmp_path, CHAIN, "train.rate=1", sweeps=("train.rate=[1, 2]",)) == [
        "-s train.rate=1: --sweep train.rate=[1, 2] sets this very value (name one copy: -s train-rate_1.rate=...)"
    ]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            "[for_each.g.v]\ntrian.rate = 1",
            ['19:1: for_each.g.v.trian: there is no node "trian" (did you mean "train"?)'],
        ),
        ("[for_each.g.v]\ntrain.rat = 1", ['19:7: for_each.g.v.train.rat: unknown key (did you mean "rate"?)']),
        ("[for_each.g.v]\ntrain.rate = 'x'", ['19:7: for_each.g.v.train.rate: expected float, got "x"']),
        (
            "[for_each.g.v]\ntrain.launch.threads = -1",
            ["19:14: for_each.g.v.train.launch.threads: must be >= 0, got -1"],
        ),
        ("[for_each.g.v]\ntrain = 1", ["18:13: for_each.g.v: expected a table of node.field = value (HINT)"]),
        (
            "[for_each.g.v]\ntrain.launch = 1",
            ["19:7: for_each.g.v.train.launch: expected a table (launch = { nproc = 2 })"],
        ),
        ("[for_each.g.v]", ["18:11: for_each.g: no variant of this group changes a value"]),
        (
            "[for_each.g]",
            ["18:11: for_each.g: a group has one table for each variant (GROUP)"],
        ),
        (
            "[for_each.g.'a b']\ntrain.rate = 1",
            [
                '18:13: for_each.g.a b: variant "a b": letters, digits, "_" and "-" only,'
                " since it is a part of node ids (HINT)"
            ],
        ),
        (
            "[for_each.g.v]\nreport.rate = 1\n[node.report-v]\nop = 'make'",
            [
                '18:13: for_each.g.v: the copy "report-v" of node "report" would have the id of another node'
                " (rename one of them)"
            ],
        ),
        ("[[for_each]]\n", ["18:3: for_each: expected a table ([for_each])"]),
        ("[[sweep]]\n", ["18:3: sweep: expected a table ([sweep])"]),
        ("[for_each]\ng = 1", ["19:1: for_each.g: a group has one table for each variant (GROUP)"]),
        ("[sweep]\ntrain.rate = []", ["19:7: sweep.train.rate: expected a list of values, one for each copy (LIST)"]),
        ("[sweep]\ntrain.rate = 1", ["19:7: sweep.train.rate: expected a list of values, one for each copy (LIST)"]),
        ("[sweep]\ntrain.rate = [1, 1]", ["19:7: sweep.train.rate: a value is given twice"]),
        ("[sweep]\ntrain.rate = [1, 'x']", ['19:7: sweep.train.rate: expected float, got "x"']),
        (
            "[sweep]\nsort = 3",
            ['19:1: sweep.sort: expected the name of a metric (sort = "eval/tau", "-train/loss" for the least first)'],
        ),
        ("[sweep]\ntrain = [1]", ["19:1: sweep.train: expected node.field = [value, value]"]),
        ("[sweep]\ntrian.rate = [1]", ['19:7: sweep.trian.rate: there is no node "trian" (did you mean "train"?)']),
    ],
)
def test_a_mistake_of_a_variant_is_told_where_the_variant_stands(
    tmp_path: Path, lines: str, expected: list[str]
) -> None:
    shown = [
        f"p.toml:{line}".replace("HINT", "train.num_layers = 2")
        .replace("LIST", "[1e-3, 3e-4]")
        .replace("GROUP", "[for_each.g.<variant>] with node.field = value")
        for line in expected
    ]
    assert mistakes(tmp_path, CHAIN + lines + "\n") == shown


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        ("train.rate", "expected node.field=[value, value]"),
        ("train=[1]", "expected node.field=[value, value]"),
        ("train.rate=[1", "not TOML: Unclosed array; text in a list needs quotes, as in TOML"),
        ("train.rate=1", "expected a list of values, one for each copy ([1e-3, 3e-4])"),
        ("trian.rate=[1]", 'there is no node "trian" (did you mean "train"?)'),
        ("train.rate=['x']", 'expected float, got "x"'),
    ],
)
def test_a_mistake_of_a_sweep_on_the_command_line_is_told_there(tmp_path: Path, sweep: str, expected: str) -> None:
    assert mistakes(tmp_path, CHAIN, sweeps=(sweep,)) == [f"--sweep {sweep}: {expected}"]


def test_a_mistake_of_the_base_is_told_once_for_all_copies_by_the_nodes_own_name(tmp_path: Path) -> None:
    text = (CHAIN + DRAFTS).replace('samples = "@capture"\n', 'samples = "@report-x"\nmore = 1\n')
    text = text.replace('rate = "${train.rate}"', 'rate = "${train.raet}"\nsamples = "@test"')
    assert mistakes(tmp_path, text) == [
        'p.toml:9:1: node.train.samples: there is no node "report-x" (did you mean "report"?)',
        "p.toml:10:1: node.train.more: unknown key (keys: samples, others, rate, title, weights, layers)",
        'p.toml:15:1: node.test.rate: node "train" has no field "raet" (did you mean "rate"?)',
        "p.toml:16:1: node.test.samples: the nodes form a cycle: test (p.toml:16) -> test"
        " (remove one of these references)",
    ]


def test_a_recorded_run_knows_the_copies_alone(tmp_path: Path) -> None:
    graph = read(tmp_path, CHAIN + DRAFTS)
    assert override_graph(graph, ["train-large.rate=4"]).nodes["train-large"].config.rate == 4
    with pytest.raises(PipelineError) as caught:
        override_graph(graph, ["train.rate=4"])
    assert str(caught.value) == '-s train.rate=4: there is no node "train" (its copies: train-small, train-large)'


def test_a_recorded_sweep_knows_what_each_copy_is_and_how_it_is_sorted(tmp_path: Path) -> None:
    text = CHAIN + '[sweep]\nsort = "-loss"\ntrain.rate = [1e-3, 2.0]\n'
    graph = read(tmp_path, text)
    read_back = graph_from_json(json.loads(json.dumps(graph_to_json(graph))))
    for found in (graph, read_back, override_graph(graph, ["train-rate_2_0.title=x"])):
        assert found.sort_by == "-loss"
        assert {node_id: node.copy for node_id, node in found.nodes.items()} == {
            **dict.fromkeys(("data", "capture", "report")),
            "train-rate_0_001": Copy("train", {"train.rate": "0.001"}),
            "train-rate_2_0": Copy("train", {"train.rate": "2.0"}),
            "test-rate_0_001": Copy("test", {"train.rate": "0.001"}),
            "test-rate_2_0": Copy("test", {"train.rate": "2.0"}),
        }


def test_more_copies_than_anybody_means_are_refused(tmp_path: Path) -> None:
    sweeps = tuple(f"data.size_{k}={list(range(100))}" for k in range(3))
    (told, *_unknown) = mistakes(tmp_path, CHAIN, sweeps=sweeps)
    assert "for_each and sweep make 5,000,000 nodes, more than 10,000" in "\n".join([told, *_unknown])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_sweeps_give_the_product_of_their_values_each_with_an_id_of_its_own(counts: list[int]) -> None:
    fields = ["max_samples", "val_fraction", "question"][: len(counts)]
    values = {field: list(range(count)) for field, count in zip(fields, counts, strict=True)}
    tree = Tree({"node": {"n": {"op": op_of(Ingest), "source": "builtin"}}}, Path.cwd())
    put_sweeps(tree, [f"n.{field}={given}" for field, given in values.items()])
    expand(tree)
    assert tree.mistakes == []
    assert len(tree.nodes) == math.prod(counts)
    assert {tuple(copy[field] for field in fields) for copy in tree.nodes.values()} == set(
        itertools.product(*values.values())
    )
    assert all(copy["source"] == "builtin" and tree.template(copy_id) == "n" for copy_id, copy in tree.nodes.items())


def test_a_key_of_thousands_of_characters_is_shortened_in_every_message(tmp_path: Path) -> None:
    file = tmp_path / "long.toml"
    file.write_text('[pipeline]\nname = "p"\n[node.ingest]\nop = "ingest"\nsource = "builtin:digits"\n')
    key = f"ingest.{'x' * 3000}"
    with pytest.raises(PipelineError) as caught:
        read_graph(file, [f"{key}=1"], [f"{key}=[1,2]", f"{key}=[3]"])
    assert all(len(str(mistake)) < 1000 for mistake in caught.value.mistakes)
